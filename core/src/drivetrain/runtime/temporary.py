"""Memory for a moment that really goes back to the system."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def temporary(num_bytes: int) -> Tensor:
    """CPU memory of its own, ``uint8``, zeros; its pages are touched when they are written.

    Not from the C allocator: between the shards that stay, the holes that whole parameters leave there fit no further
    parameter, and a rank would come to hold as much as the whole model (seen with parameters of 4 MiB).
    """
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def temporary_like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same as a tensor of this shape, stride and dtype."""
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
    return temporary(extent * dtype.itemsize).view(dtype).as_strided(shape, stride)
