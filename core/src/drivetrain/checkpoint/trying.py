"""Check that a run can load a state, and restore the state before it if loading fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.checkpoint.manifest import original_name
from drivetrain.errors import CheckpointCorruptError, CheckpointMismatchError

if TYPE_CHECKING:
    from drivetrain.backend import PortableState
    from drivetrain.checkpoint.state import Portable

_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""What torch's GradScaler gives and wants back."""

_EXTRA: dict[str, Any] = {
    "tied": str,
    "numbers": str,
    "slots": Mapping,
    "modules": object,
    "loss_scaler": (int, float),
}
"""Parts of a trainable's extra state that the core writes, and what each of them maps names to."""


def check_alike(saved: Any, here: Any, what: str) -> None:
    """Raise where a value is of another kind than the one that it is to replace. Not collective.

    Kinds are: numbers (a tensor with one element is one), strings, ``None``, mappings, sequences of the same length.
    Keys that are only on one side are passed over, as is anything where ``None`` is here.

    Raises:
        CheckpointMismatchError: names the place and both values.
    """
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        for key in here.keys() & saved.keys():
            check_alike(saved[key], here[key], f"{what}.{key}")
    elif isinstance(here, (list, tuple)) and isinstance(saved, (list, tuple)) and len(here) == len(saved):
        for index, (old, new) in enumerate(zip(saved, here, strict=True)):
            check_alike(old, new, f"{what}[{index}]")
    elif here is not None and (_kind(saved) != _kind(here) or isinstance(here, (list, tuple))):
        raise CheckpointMismatchError(
            f"{what} is {saved!r} in the checkpoint and {here!r} here",
            cure="Build the optimizer as it was built for the run that saved.",
        )


def _kind(value: Any) -> type:
    is_number = isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if is_number:
        return float
    return Mapping if isinstance(value, Mapping) else type(value)


def check_words(portable: PortableState, template: PortableState, trainable: Portable, what: str) -> None:
    """Raise where the state beside the tensors makes no sense or does not fit; nothing is changed. Not collective.

    Args:
        portable: decoded; its tensors have no values yet.
        template: what the run has, for comparison.
        trainable: what is to take it.
        what: begins the sentences.

    Raises:
        CheckpointCorruptError: no run can have saved this.
        CheckpointMismatchError: hyper-parameters of another kind than the optimizer's here.
    """
    if not isinstance(portable.extra, Mapping) or not isinstance(portable.optimizers, list):
        raise _senseless(what)
    extra: Mapping[str, Any] = portable.extra
    for name, kind in _EXTRA.items():
        if not _is_mapping(extra.get(name, {}), kind):
            raise _senseless(f"{name} of {what}")
    for name in ("frozen", "ungrouped"):
        names = extra.get(name, [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            raise _senseless(f"{name} of {what}")
    for key, tensor in portable.tensors.items():
        if key in extra.get("numbers", {}) and tensor.numel() != 1:
            raise _senseless(f"{key}, which is a number,")
    if extra.get("loss_scaler") and not all(name in extra["loss_scaler"] for name in _SCALER):
        raise _senseless(f"the loss scale of {what}")
    for number, (saved, here) in enumerate(zip(portable.optimizers, template.optimizers, strict=False)):
        for index, (old, new) in enumerate(zip(saved, here, strict=False)):
            hyper = {key: value for key, value in new.items() if key != "params"}
            check_alike(old, hyper, f"optimizers[{number}][{index}] of {what}")
    for optimizer in trainable.optimizers:
        _check_slots(portable, trainable.module, optimizer, what)


def _check_slots(portable: PortableState, module: nn.Module, optimizer: Any, what: str) -> None:
    """Let the optimizer's own ``__setstate__`` look at the state that it would get, on a stand-in for it."""
    if not isinstance(optimizer, Optimizer):
        return
    names = {id(parameter): original_name(name) for name, parameter in module.named_parameters()}
    numbers = portable.extra.get("numbers", {})
    slots: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in portable.extra.get("slots", {}).items()}
    for key, tensor in portable.tensors.items():
        if key.startswith("optim."):
            name, _, slot = key.removeprefix("optim.").rpartition(".")
            slots.setdefault(name, {})[slot] = 0 if key in numbers else tensor
    state = {
        parameter: slots[names[id(parameter)]]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if names.get(id(parameter)) in slots
    }
    kind: Any = type(optimizer)
    # An optimizer whose __del__ frees what it has made elsewhere would free the original's.
    stand_in: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": lambda _: None}))
    vars(stand_in).update(vars(optimizer))
    try:
        stand_in.__setstate__({"state": state, "param_groups": [dict(group) for group in optimizer.param_groups]})
    except Exception as problem:
        raise _senseless(f"the state of {type(optimizer).__name__} of {what} ({type(problem).__name__})") from problem


def set_extra_states(module: nn.Module, extra: Mapping[str, Any]) -> list[Callable[[], object]]:
    """Give submodules their ``set_extra_state``; returns what takes each back, also where one of them raises.

    Raises:
        CheckpointError: a submodule that is not here or has none, or that refuses its state; none has changed then.
    """
    undo: list[Callable[[], object]] = []
    parts = dict(module.named_modules(remove_duplicate=False))
    try:
        for path, value in extra.get("modules", {}).items():
            part = _with_extra_state(parts.get(path), path)
            undo.append(_extra_state_again(part))
            part.set_extra_state(value)
    except BaseException:
        for again in reversed(undo):
            again()
        raise
    return undo


def _with_extra_state(part: nn.Module | None, path: str) -> nn.Module:
    if part is None or type(part).get_extra_state is nn.Module.get_extra_state:
        raise CheckpointMismatchError(f"{path} has extra state in the checkpoint and none here")
    return part


def _extra_state_again(part: nn.Module) -> Callable[[], object]:
    before = copy.deepcopy(part.get_extra_state())
    return lambda: part.set_extra_state(before)


def remembered(item: Any) -> Callable[[], object]:
    """What gives an object its present state back, by its own two methods. Collective where those are.

    Its tensors are copied into host memory, so that an object may keep a whole second model.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    tree = _copied(item.state_dict(), copies)

    @torch.no_grad()
    def take_back() -> None:
        for tensor, was in copies:
            tensor.copy_(was)
        item.load_state_dict(tree)

    return take_back


def _copied(value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """The containers copied; the tensors themselves, with a copy of each in ``copies``."""
    if isinstance(value, Tensor):
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        copies.append((local, local.to("cpu", copy=True)))
        return value
    if isinstance(value, Mapping):
        return {key: _copied(item, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [_copied(item, copies) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)


def _is_mapping(value: Any, kind: type | tuple[type, ...]) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and all(isinstance(each, kind) for each in value.values())
    )


def _senseless(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{what} makes no sense", cure="Load an older checkpoint, this one is not sound.")
