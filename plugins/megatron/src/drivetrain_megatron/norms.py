"""Computes the gradient norm over all axes of the mesh, pipeline stages included."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.api import total_norm


@final
class GlobalNorm:
    """Norm of gradients over the pipeline's stages; sharding over the other axes is in the DTensors themselves.

    Args:
        group: the ranks of one pipeline; ``None`` when there is one stage.
        device: where the norm is wanted.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: str) -> None:
        self._group, self._device = group, torch.device(device)
        self._elsewhere: list[weakref.ref[Tensor]] = []
        self._shards: list[tuple[weakref.ref[Tensor], bool]] | None = None

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Another rank of the pipeline holds these too and counts them."""
        self._elsewhere += [weakref.ref(one) for one in parameters]

    def add_shards(self, shards: Iterable[tuple[Tensor, bool]]) -> None:
        """Add plain tensors that differ between ranks; a flag tells whether this rank counts them."""
        self._shards = (self._shards or []) + [(weakref.ref(one), counts) for one, counts in shards]

    def __call__(self, grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
        """A plain 0-d float tensor, the same on every rank. Collective over the pipeline and the DTensors' meshes."""
        if self._shards is not None:
            counted = {id(one.grad) for ref, counts in self._shards if counts and (one := ref()) is not None}
            norm = total_norm([grad for grad in grads if id(grad) in counted], norm_type)
            return self._over(None, norm, norm_type)
        if self._group is None:
            return total_norm(grads, norm_type)
        alive = [ref() for ref in self._elsewhere]
        elsewhere = {id(one.grad) for one in alive if one is not None}
        own = [grad for grad in grads if id(grad) not in elsewhere]
        return self._over(self._group, total_norm(own, norm_type), norm_type)

    def _over(self, group: dist.ProcessGroup | None, norm: Tensor, norm_type: float) -> Tensor:
        """Norms of other tensors on each rank of a group, together. Collective over it; ``None``: all ranks."""
        norm = norm.to(self._device, torch.float32)
        if math.isinf(norm_type):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group=group)
            return norm
        power = norm**norm_type
        dist.all_reduce(power, group=group)
        return power ** (1.0 / norm_type)
