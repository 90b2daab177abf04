"""The first steps under ZeRO's stages 1 and 2 compare over ranks what they reduce, before DeepSpeed does it.

ZeRO reduces gradients in buckets of what each rank has. Where a layer ran on one rank alone, buckets have other
sizes, and gloo ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from drivetrain.api import SameOrder, Topology

_STEPS = 4
"""Training steps that are compared, about: micro-batches count where they communicate."""


def compare_buckets(module: nn.Module, zero: Any, topology: Topology) -> None:
    """Stages 1 and 2: let the first reductions raise where ranks have gradients of other parameters. Not collective."""
    if topology.world_size == 1:
        return
    names = {zero.get_param_id(one): name for name, one in module.named_parameters() if id(one) in zero.param_id}
    numel = sum(one.numel() for one in module.parameters())
    order = SameOrder(topology, _STEPS * (1 + numel // zero.reduce_bucket_size))
    zero.reduce_ipg_grads = partial(_reduce, zero, zero.reduce_ipg_grads, order, names)


def _reduce(zero: Any, plain: Callable[..., Any], order: SameOrder, names: dict[int, str], **kwargs: Any) -> Any:
    if order.over:
        del zero.reduce_ipg_grads
    else:
        wanted = kwargs.get("comm_dtype")
        buckets = [bucket for dtype, bucket in zero.ipg_buckets.items() if wanted in (None, dtype)]
        order.meet("reduces gradients", [names[number] for bucket in buckets for *_, number in bucket.params])
    return plain(**kwargs)
