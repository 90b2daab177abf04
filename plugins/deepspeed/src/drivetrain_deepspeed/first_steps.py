"""Compares the collectives of the first ZeRO steps over ranks, before DeepSpeed runs them.

ZeRO reduces gradients in buckets of what each rank has, and stage 3 gathers the parameters of the layers that run.
If a layer ran on some ranks only, the sizes differ, and gloo aborts the process or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from drivetrain.api import Topology
from drivetrain_sharding import SameOrder

_STEPS = 4
"""Approximate number of training steps that are compared: micro-batches count if they communicate."""


def compare_buckets(module: nn.Module, zero: Any, topology: Topology) -> None:
    """Stages 1 and 2: let the first reductions raise where ranks have gradients of other parameters. Not collective."""
    if topology.world_size == 1:
        return
    names = {zero.get_param_id(one): name for name, one in module.named_parameters() if id(one) in zero.param_id}
    numel = sum(one.numel() for one in module.parameters())
    order = SameOrder(topology, _STEPS * (1 + numel // zero.reduce_bucket_size), type(module).__name__)
    zero.reduce_ipg_grads = partial(_reduce, zero, zero.reduce_ipg_grads, order, names)


def _reduce(zero: Any, plain: Callable[..., Any], order: SameOrder, names: dict[int, str], **kwargs: Any) -> Any:
    if order.over:
        del zero.reduce_ipg_grads
    else:
        wanted = kwargs.get("comm_dtype")
        buckets = [bucket for dtype, bucket in zero.ipg_buckets.items() if wanted in (None, dtype)]
        order.meet("reduces gradients", [names[number] for bucket in buckets for *_, number in bucket.params])
    return plain(**kwargs)


def compare_gathers(module: nn.Module, zero: Any, topology: Topology) -> SameOrder:
    """Stage 3: let the first gathers and reductions raise where ranks need other parameters. Not collective.

    Returns the comparison, for what else is collective in the first steps.
    """
    names = {id(one): name for name, one in module.named_parameters()}
    holders = sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules())
    # A step gathers each layer for forward and for backward, and reduces it once.
    order = SameOrder(topology, 3 * _STEPS * holders, type(module).__name__)
    if not order.over:
        coordinator = zero.parameter_offload.get_param_coordinator()
        gather, reduce = (f"_PartitionedParameterCoordinator{_GATHER}", f"_DeepSpeedZeroOptimizer_Stage3{_REDUCE}")
        setattr(coordinator, gather, partial(_gather, coordinator, gather, getattr(coordinator, gather), order, names))
        setattr(zero, reduce, partial(_reduce_parts, zero, reduce, getattr(zero, reduce), order, names))
    return order


_GATHER, _REDUCE = "__all_gather_params", "__reduce_and_partition_ipg_grads"
"""DeepSpeed's methods, of names that Python completes by their class."""


def _gather(
    coordinator: Any,
    attribute: str,
    plain: Callable[..., Any],
    order: SameOrder,
    names: dict[int, str],
    parameters: Iterable[nn.Parameter],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if order.over:
        delattr(coordinator, attribute)
    elif missing := [names.get(id(one), "a parameter") for one in _in_parts(parameters)]:
        order.meet("gathers parameters", sorted(missing))
    return plain(parameters, *args, **kwargs)


def _in_parts(parameters: Iterable[Any]) -> list[Any]:
    """Those that are neither gathered nor on their way."""
    return [one for one in parameters if one.ds_status is ZeroParamStatus.NOT_AVAILABLE]


def _reduce_parts(
    zero: Any, attribute: str, plain: Callable[..., Any], order: SameOrder, names: dict[int, str], dtype: Any
) -> Any:
    if order.over:
        delattr(zero, attribute)
    elif reduced := [names.get(id(one), "a parameter") for one in zero.ipg_buckets[dtype].params]:
        order.meet("reduces gradients", sorted(reduced))
    return plain(dtype)
