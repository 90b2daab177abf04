"""ZeRO-1: the optimizer sees this rank's part of each parameter, and keeps state for that part only.

Parameters and gradients stay whole in the module. Before a step the part's gradient is a view of the whole one; after
it the parts are gathered back into the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.remapping import one_kernel
from drivetrain_megatron.replicas import buckets, local_part
from drivetrain_megatron.tensor.cut import CutTensor


@final
class Parts:
    """This rank's parts of a module's parameters along the data-parallel axis.

    Args:
        mesh: of the job, with the axes ``dp`` and ``tp``.
        module: the user's module.
    """

    def __init__(self, mesh: DeviceMesh, module: nn.Module) -> None:
        self._mesh, self._module = mesh, module
        self._group, self._size = mesh["dp"].get_group(), mesh["dp"].size()
        self._rank = dist.get_rank(self._group)
        self._parts: dict[int, tuple[nn.Parameter, nn.Parameter, int]] = {}

    def divide(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace parameters in these optimizers by shards, and shard their state alike. Not collective."""
        for parameter in self._module.parameters():
            dim = self._dim(parameter)
            if dim is not None and id(parameter) not in self._parts:
                if isinstance(parameter, CutTensor):
                    parameter.pinned = "data_parallel: zero1 steps on parts that lie in it"
                part = nn.Parameter(self._part(parameter, parameter, dim))
                self._parts[id(parameter)] = (parameter, part, dim)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for index, whole in enumerate(group["params"]):
                    if id(whole) in self._parts:
                        group["params"][index] = self._exchanged(optimizer, whole)
                one_kernel(group)

    def _exchanged(self, optimizer: Optimizer, whole: nn.Parameter) -> nn.Parameter:
        _, part, dim = self._parts[id(whole)]
        state: dict[str, Any] | None = optimizer.state.pop(whole, None)
        if state is not None:
            optimizer.state[part] = {
                slot: self._part(value, whole, dim)
                if isinstance(value, Tensor) and value.shape == whole.shape
                else value
                for slot, value in state.items()
            }
        return part

    def _dim(self, parameter: nn.Parameter) -> int | None:
        """Along which dim a parameter is cut: one that ``tp`` does not cut, with a row for each rank."""
        if not parameter.requires_grad or is_absent(parameter):
            return None
        taken = (
            {one.dim for one in parameter.placements if isinstance(one, Shard)}
            if isinstance(parameter, DTensor)
            else ()
        )
        return next((dim for dim, size in enumerate(parameter.shape) if dim not in taken and size >= self._size), None)

    def _part(self, whole: Tensor, like: nn.Parameter, dim: int) -> DTensor:
        """A view of this rank's part of a tensor that is laid out like a parameter."""
        mesh = self._mesh["dp"]
        placements: list[Placement] = [Shard(dim)]
        if isinstance(like, DTensor):
            mesh, placements = self._mesh["dp", "tp"], [Shard(dim), *like.placements]
        local = local_part(whole.detach()).tensor_split(self._bounds(like.shape[dim]), dim)[self._rank]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())

    def _bounds(self, size: int) -> list[int]:
        """Return the starts of all shards but the first, as in ``torch.chunk``: the last ones are smaller or empty."""
        each = -(-size // self._size)
        return [min(each * rank, size) for rank in range(1, self._size)]

    def part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The part of a parameter; itself when it is not cut."""
        return self._parts[id(parameter)][1] if id(parameter) in self._parts else parameter

    def cut(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a tensor that is laid out like a parameter, in memory of its own. Not collective."""
        if id(parameter) not in self._parts:
            return whole
        return self._part(whole, parameter, self._parts[id(parameter)][2]).clone()

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parts of these parameters, with their gradients; what is not cut is returned as it is."""
        found: list[Tensor] = []
        for one in parameters:
            if id(one) not in self._parts:
                found.append(one)
                continue
            whole, part, dim = self._parts[id(one)]
            part.grad = None
            if whole.grad is not None:
                part.grad = self._part(whole.grad, whole, dim)
            found.append(part)
        return found

    def wholes(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that these are parts of; what is not cut is returned as it is."""
        whole_of = {id(part): whole for whole, part, _ in self._parts.values()}
        return [whole_of.get(id(one), one) for one in parts]

    def expose(self) -> None:
        """Let every part have its gradient."""
        self.of([whole for whole, _, _ in self._parts.values()])

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Drop the gradients of the parameters whose parts this optimizer has."""
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for whole, part, _ in self._parts.values():
            if id(part) in held:
                whole.grad = part.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the parameters from every rank's shards. Collective over the data-parallel ranks."""
        wholes: list[Tensor] = [whole for whole, _, _ in self._parts.values()]
        for bucket in buckets(wholes):
            self._gather(bucket)

    def _gather(self, bucket: Sequence[Tensor]) -> None:
        pieces = [
            local_part(one.detach()).tensor_split(
                self._bounds(one.shape[self._parts[id(one)][2]]), self._parts[id(one)][2]
            )
            for one in bucket
        ]
        sizes = [sum(piece[rank].numel() for piece in pieces) for rank in range(self._size)]
        sent = pieces[0][0].new_zeros(max(sizes))
        sent[: sizes[self._rank]] = torch.cat([piece[self._rank].flatten() for piece in pieces])
        received = list(sent.new_empty(self._size, len(sent)))
        dist.all_gather(received, sent, group=self._group)
        for rank, flat in enumerate(received):
            start = 0
            for piece in pieces:
                target = piece[rank]
                target.copy_(flat[start : start + target.numel()].view(target.shape))
                start += target.numel()

    @contextmanager
    def in_module(self) -> Iterator[None]:
        """Inside, the module's names lead to parts: what a checkpoint reads and writes is this rank's."""
        put: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self._module.modules():
            for name, parameter in list(module._parameters.items()):  # noqa: SLF001 (assigning by name asks for more)
                if parameter is not None and id(parameter) in self._parts:
                    put.append((module, name, parameter))
                    module._parameters[name] = self._parts[id(parameter)][1]  # noqa: SLF001
        try:
            yield
        finally:
            for module, name, parameter in put:
                module._parameters[name] = parameter  # noqa: SLF001
