"""Recognises tensors whose rows were normalised by their own mean and deviation, as ``(x - x.mean(0)) / x.std(0)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SOME = 4096
"""Elements that are looked at for having more than two values."""


def is_readable(tensor: Tensor) -> bool:
    """Whether reading values of a tensor is plain and cheap.

    Reading a tensor of a lazy device, which torch does not list as its accelerator, would run what it is the result of.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    accelerator = torch.accelerator.current_accelerator()
    return tensor.device.type in ("cpu", None if accelerator is None else accelerator.type)


@torch.no_grad()
def is_standardised(tensor: Tensor) -> bool:
    """Whether rows have mean 0 and deviation 1: each column, each channel, each feature, or all numbers together.

    That is compared up to rounding; numbers that are drawn with this mean and deviation are further away. Rows that are
    normalised each by itself do not count, nor two values alone, such as -1 and 1. Waits for the device.

    Args:
        tensor: ``(rows, ...)``; others than plain ones in 32 or 64 bits are not looked at.
    """
    if not is_readable(tensor) or tensor.dtype not in (torch.float32, torch.float64) or not tensor.dim():
        return False
    if tensor.shape[0] < 3 or len(set(tensor.reshape(-1)[:_SOME].tolist())) < 3:
        return False
    dims = tuple(range(tensor.dim()))
    if tensor.dim() > 1 and _is(tensor, (0,), 1e-5, 1e-3):
        return True
    kept = {tensor.dim() - 1, 1} if tensor.dim() > 2 else set[int]()
    ways = [*((tuple(dim for dim in dims if dim != one), 1e-5, 1e-3) for one in kept), (dims, 2e-6, 1e-4)]
    return any(_is(tensor, over, *near) and not _is(tensor, over[1:], 1e-4, 0.1) for over, *near in ways)


def _is(tensor: Tensor, dims: tuple[int, ...], near_zero: float, near_one: float) -> bool:
    """Whether the mean over some dims is 0, relative to the deviation, and that is 1, with or without Bessel's factor.

    Where numbers do not vary, as in a column of zeros, there is nothing to normalise.
    """
    if not dims:
        return False
    number = torch.Size(tensor.shape[dim] for dim in dims).numel()
    mean, deviation = tensor.mean(dims, dtype=torch.float64).flatten(), tensor.std(dims, correction=0).flatten()
    varied = deviation > 1e-6
    mean, deviation = mean[varied], deviation[varied].double()
    if number < 3 or not mean.numel() or bool((mean.abs() > near_zero * deviation).any()):
        return False
    by_fewer = deviation * (number / (number - 1)) ** 0.5
    return any(bool(((each - 1).abs() < near_one).all()) for each in (deviation, by_fewer))
