"""Accesses private state of FSDP's parameter groups: gathered parameters, and gradients that are not yet reduced.

torch has no public way to drop such gradients, which ``zero_grad`` after ``no_sync`` must, or to query a unit. Groups
are those of :func:`drivetrain_sharding.parameter_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.api import Topology
from drivetrain_fsdp.tensors import ComputedTensor, ShardedTensor, as_sharded, keep_placements_of_gradients
from drivetrain_sharding import SameOrder, convert_gradients, sharded_parameters


def drop_unreduced(groups: Iterable[Any], parameters: Iterable[Tensor]) -> None:
    """Drop the accumulated gradients of these parameters that are not reduced. Not collective."""
    wanted = {id(parameter) for parameter in parameters}
    for group in groups:
        mine = [one for one in group.fsdp_params if id(one.sharded_param) in wanted]
        for one in mine:
            one.unsharded_accumulated_grad = None
            # There is none before the first forward.
            if getattr(one, "_unsharded_param", None) is not None:
                one._unsharded_param.grad = None  # noqa: SLF001
        if len(mine) == len(group.fsdp_params):
            group._partial_reduce_output = None  # noqa: SLF001


def have_unreduced(groups: Iterable[Any]) -> bool:
    """Whether backwards have left gradients that are not reduced. Not collective."""
    return any(
        group._partial_reduce_output is not None or any(map(_has_gradient, group.fsdp_params))  # noqa: SLF001
        for group in groups
    )


def compare_first_steps(module: nn.Module, groups: Iterable[Any], topology: Topology) -> None:
    """Make the first steps raise on every rank where ranks would gather or reduce different units. Not collective.

    Later ones are not compared, and cost nothing.
    """
    units = list(groups)
    if topology.world_size > 1 and units:
        # A step gathers each unit twice, and reduces it once.
        order = SameOrder(topology, 3 * _STEPS * len(units), type(module).__name__)
        names = {part: name for name, part in module.named_modules()}
        for group in units:
            name = names.get(group.modules[0]) or type(module).__name__
            group.unshard = partial(_unshard, group, group.unshard, order, name)
            group.post_backward = partial(_post_backward, group, group.post_backward, order, name)


_STEPS = 4
"""Approximate number of training steps whose collectives are compared; varies if units stay gathered or are reused."""


def _unshard(group: Any, plain: Callable[..., Any], order: SameOrder, name: str, *args: Any, **kwargs: Any) -> Any:
    if order.over:
        del group.unshard
    elif group.is_sharded and group._all_gather_result is None:  # noqa: SLF001
        order.meet(f"gathers the parameters of {name}")
    return plain(*args, **kwargs)


def _post_backward(group: Any, plain: Callable[..., Any], order: SameOrder, name: str, *args: Any) -> Any:
    if order.over:
        del group.post_backward
    elif group.reduce_grads and not getattr(group, "reduce_scatter_unused_params", False):
        # torch may leave parameters without a name.
        named = ((one, one._param_fqn or f"parameter {index}") for index, one in enumerate(group.fsdp_params))  # noqa: SLF001
        reduced = [name for one, name in named if _has_gradient(one)]
        if reduced:
            order.meet(f"reduces the gradients of {name}", reduced)
    return plain(*args)


def _has_gradient(one: Any) -> bool:
    whole = getattr(one, "_unsharded_param", None)
    return one.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def give_sharded_tensors(groups: Iterable[Any]) -> None:
    """Make parameters and the gradients that FSDP creates :class:`ShardedTensor`. Not collective."""
    convert_gradients(groups, as_sharded)
    for parameter in sharded_parameters(groups):
        # One number may be multiplied by a loss, which is plain.
        kind = ComputedTensor if parameter.numel() == 1 else ShardedTensor
        keep_placements_of_gradients(as_sharded(cast("DTensor", parameter), kind))


def left_behind(groups: Iterable[Any]) -> bool:
    """Whether a backward gave gathered parameters gradients that FSDP did not take. Not collective.

    It takes them only if its hooks on a module's output tensors run before backward.
    """
    for group in groups:
        for one in group.fsdp_params:
            gathered = getattr(one, "_unsharded_param", None)  # There is none before the first forward.
            if gathered is not None and gathered.grad is not None:
                return True
    return False


def reshard(groups: Iterable[Any]) -> None:
    """Reshard the parameters of these groups. Not collective.

    ``FSDPModule.reshard`` costs microseconds at each step also where there is nothing to do.
    """
    for group in groups:
        if not group.is_sharded:
            group.reshard()
