"""Steps element-wise optimizers on the local shards of DTensors as plain tensors, which is faster.

Every operation on a ``DTensor`` costs some tens of microseconds of Python, and an Adam step has a dozen of them for
each parameter. Where no element's update depends on another's, the parts can be stepped alone, with the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from drivetrain.loop.optimizer import before_step

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


@contextmanager
def on_local_parts(optimizer: Optimizer) -> Iterator[None]:
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
                    before[one].update(_as_before(one, before[one], state[part]))


def steps_locally(optimizer: Optimizer) -> bool:
    """Whether stepping on local shards gives the same result: the optimizer is element-wise and has no step hooks."""
    # torch has no public accessor for step hooks.
    watching = hooks._global_optimizer_pre_hooks.values()  # noqa: SLF001
    everybodys = any(hook is not before_step for hook in watching) or hooks._global_optimizer_post_hooks  # noqa: SLF001
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001
    if type(optimizer) not in STEPPED_LOCALLY or own or everybodys:
        return False
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):  # compiled for these very tensors
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    parameters: Sequence[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
    cut = [one for one in parameters if isinstance(one, DTensor)]
    return bool(cut) and all(_alike(one, one.grad) for one in cut) and all(_state_alike(optimizer, one) for one in cut)


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


def _as_before(parameter: Tensor, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """State of the parameter: what was changed in place is the tensor that it was, new parts become DTensors."""
    found = {}
    for name, value in after.items():
        old = before.get(name)
        if _local_value(old) is value:
            found[name] = old
        else:
            found[name] = laid_out_as(parameter, value) if isinstance(value, Tensor) and value.dim() else value
    return found


__all__ = ["STEPPED_LOCALLY", "laid_out_as", "on_local_parts", "steps_locally"]
