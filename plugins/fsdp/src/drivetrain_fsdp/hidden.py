"""Accesses private state of FSDP: gathered parameters and gradients that are not yet reduced.

torch has no public way to drop such gradients, which ``zero_grad`` after ``no_sync`` must, or to query a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain.api import Topology, UnsupportedError
from drivetrain_fsdp import private_names
from drivetrain_fsdp.hooks import refuse_hooks
from drivetrain_fsdp.tensors import ComputedTensor, ShardedTensor, as_sharded, keep_placements_of_gradients
from drivetrain_sharding import SameOrder, keep_memory


def drop_unreduced(modules: Iterable[FSDPModule], parameters: Iterable[Tensor]) -> None:
    """Drop the accumulated gradients of these parameters that are not reduced. Not collective."""
    wanted = {id(parameter) for parameter in parameters}
    for group in groups(modules):
        mine = [one for one in group.fsdp_params if id(one.sharded_param) in wanted]
        for one in mine:
            one.unsharded_accumulated_grad = None
            # There is none before the first forward.
            if getattr(one, "_unsharded_param", None) is not None:
                one._unsharded_param.grad = None  # noqa: SLF001
        if len(mine) == len(group.fsdp_params):
            group._partial_reduce_output = None  # noqa: SLF001


def hear_of_backwards(modules: Iterable[FSDPModule], reached: Callable[[Any], None]) -> None:
    """Call ``reached`` with a unit before each backward reaches it, also one that the script began. Not collective."""
    for group in groups(modules):
        group.pre_backward = partial(_pre_backward, group.pre_backward, partial(reached, group))


def compare_first_steps(module: nn.Module, modules: Iterable[FSDPModule], topology: Topology) -> None:
    """Make the first steps raise on every rank where ranks would gather or reduce different units. Not collective.

    Later ones are not compared, and cost nothing.
    """
    units = list(groups(modules))
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


def gathered(group: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the gathered parameters of a unit that a forward has used, with their names. Not collective."""
    for one in group.fsdp_params:
        whole = getattr(one, "_unsharded_param", None)
        if whole is not None:
            yield one._param_fqn, whole  # noqa: SLF001


def give_sharded_tensors(modules: Iterable[FSDPModule]) -> None:
    """Make parameters and the gradients that FSDP creates :class:`ShardedTensor`. Not collective."""
    for group in groups(modules):
        for one in group.fsdp_params:
            one.to_sharded_dtensor = partial(_sharded, one.to_sharded_dtensor)
            one.init_unsharded_param = partial(_init_unsharded, one, one.init_unsharded_param)
    for module in modules:
        for parameter in cast("nn.Module", module).parameters():
            if isinstance(parameter, DTensor):
                # One number may be multiplied by a loss, which is plain.
                kind = ComputedTensor if parameter.numel() == 1 else ShardedTensor
                keep_placements_of_gradients(as_sharded(parameter, kind))


def _sharded(make: Callable[[Tensor], DTensor], local: Tensor) -> DTensor:
    return as_sharded(make(local))


def _init_unsharded(one: Any, init: Callable[[], None]) -> None:
    init()
    # It is created once; where an extension creates it each time, hooks are refused on the first only.
    del one.init_unsharded_param
    private_names.check_gathered(one)
    refuse_hooks(one._unsharded_param)  # noqa: SLF001
    # torch may leave parameters without a name.
    name = f"parameter {one._param_fqn}" if one._param_fqn else "a parameter"  # noqa: SLF001
    keep_memory(one._unsharded_param, f"{name}, which is gathered for a forward and its backward,")  # noqa: SLF001


def refuse_other_values(modules: Iterable[FSDPModule]) -> None:
    """Raise in a forward of a unit that was given other tensors than its parameters. Not collective.

    FSDP puts gathered parameters in their places, and would compute with those.
    """
    for group in groups(modules):
        group.pre_forward = partial(_pre_forward, group, group.pre_forward)


def _pre_forward(group: Any, plain: Callable[..., Any], *args: Any) -> Any:
    for one in group.fsdp_params:
        info = one._module_info  # noqa: SLF001
        found = info.module._parameters.get(info.param_name)  # noqa: SLF001
        if found is None:
            raise UnsupportedError(
                f"the parameter {info.param_name} of {type(info.module).__name__} was taken out of it after prepare "
                "(parametrizations and pruning do that), and fsdp would gather and save it still",
                cure="Prune and parametrize a model before accelerator.prepare(model, optimizer).",
            )
        if found is not one.sharded_param and all(found is not getattr(one, each, None) for each in _WHOLE):
            raise UnsupportedError(
                f"{type(info.module).__name__} was called with another tensor as its {info.param_name} "
                "(torch.func.functional_call), and fsdp would compute with its own",
                cure="Compute with other values in a second model that is not prepared, or use distributed_type: ddp.",
            )
    return plain(*args)


def _pre_backward(plain: Callable[..., None], reached: Callable[[], None], *args: Any) -> None:
    # In a backward, gradients are enabled under create_graph=True alone.
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "fsdp cannot differentiate a gradient (create_graph=True, as a gradient penalty does): the parameters "
            "that it gathers for the first backward are freed before the second",
            cure="Use distributed_type: ddp for this model, or a loss without second derivatives.",
        )
    reached()
    plain(*args)


def is_own(modules: Iterable[FSDPModule], parent: nn.Module, name: str, value: Any) -> bool:
    """Whether this parameter is FSDP's own: a shard, or the gathered parameter of one forward."""
    for group in groups(modules):
        for one in group.fsdp_params:
            info = one._module_info  # noqa: SLF001
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            if any(module is parent and its == name for module, its in places):
                mine = (one.sharded_param, *(getattr(one, each, None) for each in _WHOLE))
                return any(value is each for each in mine)
    return False


_WHOLE = ("_unsharded_param", "_sharded_post_forward_param")


def left_behind(modules: Iterable[FSDPModule]) -> bool:
    """Whether a backward gave gathered parameters gradients that FSDP did not take. Not collective.

    It takes them only if its hooks on a module's output tensors run before backward.
    """
    for group in groups(modules):
        for one in group.fsdp_params:
            gathered = getattr(one, "_unsharded_param", None)  # There is none before the first forward.
            if gathered is not None and gathered.grad is not None:
                return True
    return False


def reshard(units: Iterable[Any]) -> None:
    """Reshard the parameters of these :func:`groups`. Not collective.

    ``FSDPModule.reshard`` costs microseconds at each step also where there is nothing to do.
    """
    for group in units:
        if not group.is_sharded:
            group.reshard()


def groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """FSDP's parameter groups: the parameters of each module that are in none of its inner units."""
    for module in modules:
        yield from private_names.groups_of(module)
