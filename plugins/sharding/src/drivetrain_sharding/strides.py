"""Keeps the strides that a script gave a weight, where an engine lays its memory out row by row.

Values do not depend on strides, but random numbers do: torch fills memory in its own order. ``torch.randn_like(p)`` of
a transposed weight, or one in ``channels_last``, would give each element another number than on one process.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_other_strides(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, and not row by row. Copies keep such strides."""
    return not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor's values in this order of memory: itself where it has it, or where elements would overlap.

    Args:
        tensor: of any shape. A copy's gradient flows to it.
        strides: one of each dim, in elements.
    """
    if tensor.stride() == tuple(strides) or _overlap(tensor.shape, strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


__all__ = ["has_other_strides", "with_strides"]
