"""Steps element-wise optimizers on the local shards of DTensors as plain tensors, which is faster.

Every operation on a ``DTensor`` costs some tens of microseconds of Python, and an Adam step has a dozen of them for
each parameter. If no element's update depends on another's, shards can be stepped separately, with the same result.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from drivetrain.api import StepResult, TorchEngine, UnsupportedError

STEPPED_LOCALLY: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
    }
)
"""Exact classes: a subclass may do anything."""


def step_on_parts(
    engine: TorchEngine,
    optimizer: Optimizer,
    closure: Callable[[], Any] | None = None,
    *,
    kept_as: Callable[[DTensor], DTensor] | None = None,
) -> StepResult:
    """One update by :meth:`drivetrain.api.TorchEngine.step`, on this rank's parts if :func:`steps_locally`.

    Not under a loss scaler, which looks at gradients itself, nor with a closure, which computes gradients of the
    parameters as the model has them. Collective where the engine's step is.

    Args:
        engine: runs the step.
        optimizer: of the script, over DTensors.
        closure: of the script, if any.
        kept_as: converts new state tensors, such as to an engine's own class of DTensor.
    """
    if engine.scaler is not None or closure is not None:
        return engine.step(optimizer, closure)
    return engine.step(optimizer, stepping=partial(on_local_parts, optimizer, kept_as))


@contextmanager
def on_local_parts(optimizer: Optimizer, kept_as: Callable[[DTensor], DTensor] | None = None) -> Iterator[None]:
    """Context in which an optimizer has plain tensors that share memory with its DTensors, if :func:`steps_locally`.

    Its state is DTensors again afterwards; only the optimizer's own step may run inside. Not collective.
    """
    # A subclass of DTensor may intercept each attribute that a script reads; no script code runs here.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch has no public word for it)
        groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        pairs = [(one, _local(one)) for params in groups for one in params] if steps_locally(optimizer) else None
    if pairs is None:
        yield
        return
    before = optimizer.state
    local = {id(one): part for one, part in pairs}
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for one, part in pairs:
        if one in before:
            state[part] = {name: _local_value(value) for name, value in before[one].items()}
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [local[id(one)] for one in params]
    optimizer.state = state
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state = before
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for one, part in pairs:
                if part in state:
                    before[one].update(_as_before(one, before[one], state[part], kept_as))


def step_hooks(optimizer: Optimizer) -> list[tuple[dict[int, Any], int]]:
    """The script's hooks on the steps of an optimizer, or of all: torch's dictionaries, and their keys in them."""
    # torch has no public accessor for step hooks.
    kept = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        hooks._global_optimizer_pre_hooks,  # noqa: SLF001
        hooks._global_optimizer_post_hooks,  # noqa: SLF001
    )
    return [(each, key) for each in kept for key, hook in each.items() if not hasattr(hook, "only_reads")]


def steps_locally(optimizer: Optimizer) -> bool:
    """Whether stepping on local shards gives the same result: the optimizer is element-wise and has no step hooks."""
    if type(optimizer) not in STEPPED_LOCALLY or step_hooks(optimizer):
        return False
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):  # compiled for these very tensors
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    parameters: Sequence[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
    cut = [one for one in parameters if isinstance(one, DTensor)]
    return bool(cut) and all(_alike(one, one.grad) for one in cut) and all(_state_alike(optimizer, one) for one in cut)


def check_step_hooks(optimizer: Optimizer, tried: set[int], steps_on: str) -> None:
    """Refuse step hooks that would see that an optimizer steps on flat parts of the parameters. Not collective.

    Args:
        optimizer: about to step.
        tried: keys of hooks that change each element by itself; those that are found to are added.
        steps_on: what the engine lets optimizers step on, for the message.

    Raises:
        UnsupportedError: a hook is not element-wise, or changes nothing, so that it may look at a part.
    """
    for kept, key in step_hooks(optimizer):
        if key in tried:
            continue
        if not _changes_elements(kept[key], optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} has a step hook that does not change each element by itself, and is given "
                f"{steps_on}",
                cure="Do it before optimizer.step() or after it; accelerator.clip_grad_norm_(model.parameters(), "
                "math.inf) measures all gradients.",
            )
        tried.add(key)


def _changes_elements(hook: Callable[..., Any], optimizer: Optimizer) -> bool:
    """Whether a hook writes to small parameters or gradients, and the same where it is given one flat part of them."""
    # For each group values and gradients.
    drawn = torch.randn(len(optimizer.param_groups), 2, 12, generator=torch.Generator().manual_seed(0))

    def called(numbers: Tensor, *shape: int) -> Tensor:
        given = copy.copy(optimizer)
        given.state = defaultdict(dict)
        params = [torch.nn.Parameter(value.clone().view(shape)) for value in numbers[:, 0]]
        for one, grad in zip(params, numbers[:, 1], strict=True):
            one.grad = grad.clone().view(shape)
        given.param_groups = [
            {**group, "params": [one]} for group, one in zip(optimizer.param_groups, params, strict=True)
        ]
        hook(given, (given,), {})
        pairs = [torch.stack([one.detach(), torch.zeros_like(one) if one.grad is None else one.grad]) for one in params]
        return torch.stack(pairs).flatten(2)

    try:
        whole = called(drawn, 3, 4)
        parts = torch.cat([called(drawn[..., :5], 5), called(drawn[..., 5:], 7)], -1)
    except (LookupError, RuntimeError, TypeError):
        return False
    return not torch.equal(whole, drawn) and torch.allclose(whole, parts, rtol=1e-6, atol=1e-6)


def laid_out_as(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's part, laid out as the parameter is; as it is for a plain one. Not collective."""
    if not isinstance(parameter, DTensor):
        return local
    if local.dtype == parameter.dtype and not local.requires_grad:
        # A fifteenth of what from_local costs, which makes the same description once more.
        spec = parameter._spec  # noqa: SLF001 (torch's own way, in FSDP)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _alike(parameter: DTensor, other: Tensor | None) -> bool:
    """Parts of the two lie on the same ranks, element by element."""
    if other is None:
        return True
    if not isinstance(other, DTensor):
        return False
    if other._spec is parameter._spec:  # noqa: SLF001 (spares the comparison, not more)
        return True
    return (other.device_mesh, other.placements, other.shape) == (
        parameter.device_mesh,
        parameter.placements,
        parameter.shape,
    )


def _state_alike(optimizer: Optimizer, parameter: DTensor) -> bool:
    values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return all(_alike(parameter, one) for one in values if isinstance(one, Tensor) and one.dim())


def _local(parameter: Tensor) -> Tensor:
    """This rank's part with its gradient; what is not cut, as it is."""
    if not isinstance(parameter, DTensor):
        return parameter
    part: Tensor = parameter._local_tensor.detach()  # noqa: SLF001 (to_local costs as much as what is saved here)
    if parameter.grad is not None:
        part.grad = parameter.grad._local_tensor  # type: ignore[attr-defined] # noqa: SLF001
    return part


def _local_value(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001


def _as_before(
    parameter: Tensor,
    before: dict[str, Any],
    after: dict[str, Any],
    kept_as: Callable[[DTensor], DTensor] | None,
) -> dict[str, Any]:
    """State of the parameter: what was changed in place is the tensor that it was, new parts become DTensors."""
    found = {}
    for name, value in after.items():
        old = before.get(name)
        if _local_value(old) is value:
            found[name] = old
        else:
            made = laid_out_as(parameter, value) if isinstance(value, Tensor) and value.dim() else value
            found[name] = kept_as(made) if kept_as is not None and isinstance(made, DTensor) else made
    return found


def leaves_ranks_out(tensor: Any) -> bool:
    """Whether a DTensor has fewer rows than it has parts, so that some ranks hold nothing of it. Not collective."""
    for parts, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            rows = tensor.shape[placement.dim]
            if rows < parts or -(-rows // -(-rows // parts)) < parts:
                return True
    return False
