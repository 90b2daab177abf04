"""Recognises tensors whose rows were normalised by their own mean and deviation, as ``(x - x.mean(0)) / x.std(0)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SOME = 4096
"""Elements that are looked at for having more than two values."""


@torch.no_grad()
def is_standardised(tensor: Tensor) -> bool:
    """Whether rows have mean 0 and deviation 1: each column, each channel, each feature, or all numbers together.

    Rounding apart, which no data drawn with that mean and deviation have. Not so where each row has by itself, as after
    a normalisation of samples, nor where there are two values alone, as of -1 and 1. Waits for the device.

    Args:
        tensor: ``(rows, ...)``; others than plain ones in 32 or 64 bits are not looked at.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.dtype not in (torch.float32, torch.float64) or not tensor.dim():
        return False
    accelerator = torch.accelerator.current_accelerator()
    # Reading a tensor of a lazy device would run what it is the result of.
    if tensor.device.type not in ("cpu", None if accelerator is None else accelerator.type):
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
