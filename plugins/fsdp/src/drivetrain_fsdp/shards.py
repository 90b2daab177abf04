"""Helpers for the local shards of full tensors and parameters. Not collective unless stated otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.api import Topology
from drivetrain_sharding import temporary

Box = tuple[slice, ...]
Reader = Callable[[Box], Tensor]
"""Function that returns the part of a tensor in a box, as a copy or a view."""


def box_of(tensor: Tensor) -> Box:
    """Return the box of this rank's shard of a DTensor; of all elements for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    if not tensor.to_local().numel():
        return tuple(slice(0, size) for size in tensor.to_local().shape)
    # What torch.distributed.checkpoint asks of a DTensor.
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def part_like(like: Tensor, read: Reader, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor laid out as ``like`` (which may be on meta), its values from ``read``."""
    part = read(box_of(like)).to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def reader_of(full: Tensor) -> Reader:
    """Return a reader of a full tensor on this rank."""
    return lambda box: full[box] if box else full


def from_rank_zero(full: Tensor | None, like: Tensor, topology: Topology) -> Reader:
    """Broadcast rank 0's full tensor. Collective over all ranks.

    Args:
        full: the tensor, on rank 0; ignored elsewhere.
        like: shape and dtype of it.
        topology: the job.
    """
    if topology.world_size == 1 and full is not None:
        return reader_of(full)
    num_bytes = like.numel() * like.element_size()
    # As bytes: not every communication backend carries every dtype.
    on_cpu = topology.device == "cpu"
    sent = temporary(num_bytes) if on_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=topology.device)
    whole = sent.view(like.dtype).view(like.shape)
    if topology.rank == 0 and full is not None:
        whole.copy_(full)
    if num_bytes:
        dist.broadcast(sent, src=0)
    return reader_of(whole)


def replace_parameter(module: nn.Module, names: list[str], value: Tensor, requires_grad: bool) -> None:
    """Put one new parameter under all the names of a tied one."""
    parameter = nn.Parameter(value, requires_grad=requires_grad)
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, parameter)


def replace_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a new buffer under its name."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, value)


def local_device(tensor: Any) -> torch.device:
    """Return the device of this rank's shard."""
    device: torch.device = tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device
    return device
