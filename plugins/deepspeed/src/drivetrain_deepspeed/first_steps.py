"""The first steps under ZeRO compare over ranks what they gather and reduce: DeepSpeed waits or ends the process else.

ZeRO reduces gradients in buckets of what each rank has. Where a layer ran on one rank alone, buckets have other sizes.
Under stage 3 such a layer's parameters are gathered by one rank, while others are at another collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
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


@final
class FirstLayers:
    """Stage 3: the first forwards with gradients raise where ranks run other layers.

    Args:
        module: the user's.
        topology: the job.
    """

    def __init__(self, module: nn.Module, topology: Topology) -> None:
        layers = {layer: name for name, layer in module.named_modules() if any(True for _ in layer.parameters(False))}
        self._order = SameOrder(topology, _STEPS * (len(layers) + 1))
        self._handles = [
            # Before DeepSpeed's, which gathers.
            layer.register_forward_pre_hook(partial(self._begin, name or type(module).__name__), prepend=True)
            for layer, name in layers.items()
            if not self._order.over
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, name: str, _layer: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._meet(f"runs {name}")

    def begin_backward(self) -> None:
        """A backward is about to begin. Collective in the first steps."""
        if self._handles:
            self._meet("is at the backward")

    def _meet(self, action: str) -> None:
        if self._order.over:
            self.remove()
        else:
            self._order.meet(action)

    def remove(self) -> None:
        """Compare no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
