"""Reduces over processes: by XLA's collectives in the graph, or over the host if these do not span the processes.

On TPUs the processes' devices form one XLA world, and a sum is an operation of the graph. On CPUs each process is an
XLA world of its own; there the host sums over gloo, which waits for the device in each step.
"""

from __future__ import annotations

from typing import Protocol, final

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from drivetrain.api import ReduceOp, Topology, collectives, gradients

_DEVICE_OPS = {"sum": xm.REDUCE_SUM, "mean": xm.REDUCE_SUM, "max": xm.REDUCE_MAX, "min": xm.REDUCE_MIN}


class Reduction(Protocol):
    """Sums and means over all processes. Collective over them."""

    def gradients(self, parameters: list[Tensor]) -> None:
        """Average each parameter's ``.grad`` over the processes; one that has none on any of them keeps none."""

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """See :meth:`drivetrain.api.Backend.reduce`."""

    def give(self, tensors: list[Tensor]) -> None:
        """Fill these tensors with rank 0's values."""


@final
class HostReduction:
    """Over gloo, from host memory.

    Args:
        host: the topology with the CPU for a device.
    """

    def __init__(self, host: Topology) -> None:
        self._host = host

    @torch.no_grad()
    def gradients(self, parameters: list[Tensor]) -> None:
        """Average all gradients of one dtype in one collective, after reducing a flag per parameter."""
        have = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        counts = collectives.all_reduce(have, "sum", self._host).tolist()
        present = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in present:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for alike in by_dtype.values():
            parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in alike]
            flat = torch.cat([part.reshape(-1) for part in parts]).cpu()
            mean = collectives.all_reduce(flat, "mean", self._host).to(alike[0].device)
            sizes = [part.numel() for part in parts]
            for parameter, part in zip(alike, torch.split_with_sizes(mean, sizes), strict=True):
                parameter.grad = part.view(parameter.shape)

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        return collectives.all_reduce(tensor, op, self._host)

    @torch.no_grad()
    def give(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(collectives.broadcast(tensor, 0, self._host))


@final
class DeviceReduction:
    """Recorded in the graph; nothing waits. Every process must have recorded the same graph.

    Args:
        topology: of the job.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    @torch.no_grad()
    def gradients(self, parameters: list[Tensor]) -> None:
        """Average existing gradients: graphs are the same on all processes, so either all or none have a gradient."""
        xm.all_reduce(xm.REDUCE_SUM, gradients(parameters), scale=1.0 / self._topology.dp_size)

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """Reduce floating-point tensors on the device in the graph, others over the host."""
        if tensor.device.type != "xla" or not tensor.is_floating_point() or op not in _DEVICE_OPS:
            return collectives.all_reduce(tensor, op, self._topology)
        summed: Tensor = xm.all_reduce(_DEVICE_OPS[op], tensor.detach())
        return summed / self._topology.dp_size if op == "mean" else summed

    @torch.no_grad()
    def give(self, tensors: list[Tensor]) -> None:
        """Broadcast from rank 0 by a sum to which the other ranks add zeros; booleans are sent as integers."""
        for tensor in tensors:
            sent = tensor.to(torch.int32) if tensor.dtype is torch.bool else tensor
            tensor.copy_(xm.all_reduce(xm.REDUCE_SUM, sent * int(self._topology.rank == 0)))
