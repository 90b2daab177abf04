"""Converts a torch module and its optimizers to the state of a portable checkpoint, and back.

Backends whose parameters are the module's own (plain tensors or DTensors) call these functions from their
``Trainable``; nothing here is collective.

Names are found by the identity of parameters, so that order, grouping and tying do not matter. A tied parameter goes
by its first name; the others are recorded. Optimizer state becomes tensors: a tensor as it is, a number as a 0-d
tensor whose kind is recorded; anything else (L-BFGS keeps lists) goes to ``extra`` and must be the same on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.distributed.dtensors import is_dtensor
from drivetrain.errors import CheckpointError, CheckpointMismatchError
from drivetrain.parameter_names import original_name

_NOT_OF_THE_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""Keys of a parameter group that select an implementation on this device."""

_NONE: Mapping[int, bool] = {}

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def portable_state(module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> PortableState:
    """Return the full state under original names; tensors are the live ones, not copies.

    Args:
        module: parameters and persistent buffers become ``model.<fqn>``.
        optimizers: state of those parameters that are the module's becomes ``optim.<fqn>.<slot>``; parameters of other
            modules are left to those.

    Raises:
        CheckpointError: two of the optimizers hold one parameter.
    """
    names, tied = _names(module)
    state = PortableState({f"model.{name}": tensor.detach() for name, tensor in _model_tensors(module)})
    numbers: dict[str, str] = {}
    others: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for optimizer in optimizers:
        state.optimizers.append(_groups(optimizer, names))
        for parameter, name in _own_parameters(optimizer, names):
            if name in seen:
                raise CheckpointError(
                    f"two optimizers hold the parameter {name}", cure="Give each parameter to one optimizer."
                )
            seen.add(name)
            for slot, value in optimizer.state.get(parameter, {}).items():
                key = f"optim.{name}.{slot}"
                if isinstance(value, Tensor):
                    state.tensors[key] = value.detach()
                elif type(value) in _NUMBERS:
                    state.tensors[key] = torch.tensor(value, dtype=_NUMBERS[type(value)])
                    numbers[key] = type(value).__name__
                else:
                    others.setdefault(name, {})[str(slot)] = value
    frozen = [original_name(name) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    state.extra = _without_empty(tied=tied, numbers=numbers, slots=others, modules=_extra_states(module), frozen=frozen)
    return state


def portable_template(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, TensorSpec],
    owned: Mapping[int, bool] = _NONE,
) -> PortableState:
    """Tensors to be filled from a checkpoint that holds ``saved``.

    Parameters and buffers are the live ones, so that filling them needs no memory. Slots of the optimizer are new: live
    ones keep their values until :func:`load_portable_state`. A slot shaped like its parameter is laid out like it; one
    that is not follows the live slot of that name, else it is a plain tensor beside the parameter (0-d: on the CPU
    unless the group is ``capturable`` or ``fused``, as torch's own optimizers keep their step).

    Args:
        module: that is filled.
        optimizers: that are filled.
        saved: what the checkpoint has.
        owned: by ``id`` of each parameter whose state one rank keeps, whole, whether this one does.

    Returns:
        Tensors; the parameter groups as they are here, for comparison; the tied names in ``extra``.
    """
    names, tied = _names(module)
    template = PortableState({f"model.{name}": tensor.detach() for name, tensor in _model_tensors(module)})
    slots: dict[str, list[str]] = {}
    for key in saved:
        kind, _, rest = key.partition(".")
        if kind == "optim":
            slots.setdefault(rest.rpartition(".")[0], []).append(key)
    for optimizer in optimizers:
        template.optimizers.append(_groups(optimizer, names))
        on_device = {
            id(parameter)
            for group in optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for parameter in group["params"]
        }
        for parameter, name in _own_parameters(optimizer, names, owned):
            own = optimizer.state.get(parameter, {})
            for key in slots.get(name, ()):
                live, spec = own.get(key.rpartition(".")[2]), saved[key]
                if isinstance(live, Tensor) and tuple(live.shape) == spec.shape:
                    template.tensors[key] = torch.empty_like(live)
                    continue
                dtype = getattr(torch, spec.dtype)
                if id(parameter) not in owned and spec.shape and spec.shape == tuple(parameter.shape):
                    template.tensors[key] = torch.empty_like(parameter.detach(), dtype=dtype)
                else:
                    device = parameter.device if spec.shape or id(parameter) in on_device else torch.device("cpu")
                    template.tensors[key] = torch.empty(spec.shape, dtype=dtype, device=device)
    template.extra = _without_empty(tied=tied)
    return template


@torch.no_grad()
def load_portable_state(
    module: nn.Module, optimizers: Sequence[Optimizer], state: PortableState, owned: Mapping[int, bool] = _NONE
) -> None:
    """Take over a filled template, with the `owned` that it was made with.

    Parameters and buffers that ``state`` lacks keep their values. Optimizer state is replaced, also by nothing. Of the
    hyper-parameters of the groups all are taken but those of the device (``foreach``, ``fused``, ``capturable``).

    Raises:
        CheckpointMismatchError: other parameter groups; parameters and buffers may be filled by then, the optimizer is
            as it was.
    """
    names, tied = _names(module)
    saved_tied = {**state.extra.get("tied", {}), **tied}
    for optimizer, saved in zip(optimizers, state.optimizers, strict=bool(state.optimizers)):
        _check_groups(_groups(optimizer, names), saved, saved_tied, state.extra.get("ungrouped", ()))
    _fill(module, state.tensors)
    for path, value in state.extra.get("modules", {}).items():
        module.get_submodule(path).set_extra_state(value)
    if not state.optimizers:
        return
    slots: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in state.extra.get("slots", {}).items()}
    for key, value in state.tensors.items():
        if key.startswith("optim."):
            name, _, slot = key.removeprefix("optim.").rpartition(".")
            slots.setdefault(name, {})[slot] = value
    numbers: Mapping[str, str] = state.extra.get("numbers", {})
    for optimizer, saved in zip(optimizers, state.optimizers, strict=True):
        for parameter, name in _own_parameters(optimizer, names, owned):
            live = optimizer.state.pop(parameter, {})
            loaded = dict(slots.get(name, {}))
            for slot, value in loaded.items():
                # A number that was saved as a tensor, unless this optimizer keeps a tensor there.
                is_number = f"optim.{name}.{slot}" in numbers and not isinstance(live.get(slot), Tensor)
                if is_number and isinstance(value, Tensor):
                    loaded[slot] = value.item()
            if loaded:
                optimizer.state[parameter] = loaded
        for group, old in zip(_groups_held(optimizer, names), saved, strict=True):
            _take_hyper_parameters(group, old)
        # What load_state_dict ends with: an optimizer's own hook for state of an older shape (Adam's step as a number).
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, as ``model.<fqn>``."""
    return {f"model.{name}": tensor.detach() for name, tensor in _model_tensors(module)}


def buffer_keys(module: nn.Module) -> set[str]:
    """Return the keys of :func:`live_tensors` that may be buffers, as ``model.<fqn>``."""
    return {f"model.{original_name(name)}" for name, _ in module.named_buffers()}


def first_names(module: nn.Module) -> dict[int, str]:
    """Return the name in the checkpoint of each parameter and buffer, by ``id``."""
    return _names(module)[0]


def tied_names(module: nn.Module) -> dict[str, str]:
    """Each further name of a tied parameter or buffer, with its first one."""
    return _names(module)[1]


def _model_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once."""
    for name, parameter in module.named_parameters():
        yield original_name(name), parameter
    volatile = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set  # noqa: SLF001  torch has no public word for it.
    }
    for name, buffer in module.named_buffers():
        if name not in volatile:
            yield original_name(name), buffer


def _names(module: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """First name by identity of each parameter and buffer, and the first name of each further one."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for found in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for raw, tensor in found:
            name = original_name(raw)
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return first, tied


def _own_parameters(
    optimizer: Optimizer, names: Mapping[int, str], owned: Mapping[int, bool] = _NONE
) -> Iterator[tuple[Tensor, str]]:
    """Parameters of the module whose state this rank has, with their names."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names and owned.get(id(parameter), True):
                yield parameter, names[id(parameter)]


def _groups_held(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The groups that hold some of the module's parameters."""
    return [group for group in optimizer.param_groups if any(id(one) in names for one in group["params"])]


def _groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "params": [names[id(one)] for one in group["params"] if id(one) in names],
            **{key: value for key, value in group.items() if key not in _NOT_OF_THE_RUN},
        }
        for group in _groups_held(optimizer, names)
    ]


def _check_groups(
    here: list[dict[str, Any]], saved: list[dict[str, Any]], tied: Mapping[str, str], ungrouped: Sequence[str]
) -> None:
    ours = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in here]
    theirs = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in saved]
    if ours != theirs:
        differing = sorted(set().union(*ours) ^ set().union(*theirs)) or ["their order or split"]
        raise CheckpointMismatchError(
            f"the parameter groups of the checkpoint are not those of the optimizer: {', '.join(differing[:6])}",
            cure="Build the optimizer as it was built for the run that saved.",
        )


def _take_hyper_parameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key in _NOT_OF_THE_RUN:
            continue
        present = group.get(key)
        if isinstance(present, Tensor):
            present.copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, Tensor) and isinstance(present, (int, float)) else value


def _fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what was not read into the module's own memory already."""
    for name, live in _model_tensors(module):
        value = tensors.get(f"model.{name}")
        if value is None:
            continue
        if is_dtensor(live) and not is_dtensor(value):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, live.device_mesh, live.placements, src_data_rank=None)
        local = live.to_local() if is_dtensor(live) else live
        source = value.to_local() if is_dtensor(value) else value
        if local.data_ptr() != source.data_ptr() or local.device != source.device:
            live.copy_(value)


def _extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra state of submodules (``nn.Module.get_extra_state``), by path."""
    own = nn.Module.get_extra_state
    return {
        path: part.get_extra_state() for path, part in module.named_modules() if type(part).get_extra_state is not own
    }


def _without_empty(**parts: Any) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part}
