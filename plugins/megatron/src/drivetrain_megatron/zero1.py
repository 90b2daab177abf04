"""ZeRO-1: the optimizer steps on this rank's part of each parameter, and keeps state for that part only.

Parameters and gradients stay whole in the module and in the optimizer's groups, for scripts to read, write and regroup.
For a step each parameter is exchanged for a part, a view of the parameter as it is then; after the step the parts are
gathered into the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
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
        self._made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        """Parameters and the parts that were made of them last, by identity of the parameter."""

    @contextmanager
    def in_optimizers(self, optimizers: Sequence[Optimizer]) -> Iterator[dict[int, nn.Parameter]]:
        """Exchange the parameters in these optimizers for parts, with their gradients and states. Not collective.

        Yields:
            The parts, by identity of the parameter.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = [group["params"] for group in groups]
        with torch.no_grad():
            pairs = [(one, part) for params in held for one in params if (part := self._part(one)) is not None]
        parts = {id(whole): part for whole, part in pairs}
        try:
            for optimizer in optimizers:
                for whole, part in pairs:
                    if whole in optimizer.state:
                        optimizer.state[part] = self._cut_state(optimizer.state[whole], whole)
                        del optimizer.state[whole]
            for group, params in zip(groups, held, strict=True):
                group["params"] = [parts.get(id(one), one) for one in params]
                one_kernel(group)
            yield parts
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            self._made = {key: pair for key, pair in self._made.items() if pair[0]() is not None}
            for whole, part in pairs:
                self._made[id(whole)] = (weakref.ref(whole), part)
                part.grad = None
                for optimizer in optimizers:
                    if part in optimizer.state:
                        optimizer.state[whole] = optimizer.state.pop(part)

    @contextmanager
    def in_checkpoint(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Exchange them in the module too, so that this rank saves and loads its parts. Not collective."""
        put: list[tuple[nn.Module, str, nn.Parameter]] = []
        with self.in_optimizers(optimizers) as parts:
            for module in self._module.modules():
                for name, parameter in list(module._parameters.items()):  # noqa: SLF001 (assigning by name asks for more)
                    if id(parameter) in parts and parameter is not None:
                        put.append((module, name, parameter))
                        module._parameters[name] = parts[id(parameter)]  # noqa: SLF001
            try:
                yield
            finally:
                for module, name, parameter in put:
                    module._parameters[name] = parameter  # noqa: SLF001

    def cut(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a tensor that is laid out like a parameter, in memory of its own. Not collective."""
        dim = self._dim(parameter)
        return whole if dim is None else self._view(whole, parameter, dim).clone()

    @torch.no_grad()
    def gather(self, optimizers: Sequence[Optimizer]) -> None:
        """All-gather the parameters of these optimizers from every rank's parts. Collective over ``dp``."""
        held = {id(one): one for each in optimizers for group in each.param_groups for one in group["params"]}
        dims = {key: dim for key, one in held.items() if (dim := self._dim(one)) is not None}
        for bucket in buckets([held[key] for key in dims]):
            self._gather(bucket, [dims[id(one)] for one in bucket])

    def _gather(self, bucket: Sequence[Tensor], dims: Sequence[int]) -> None:
        pieces = [
            local_part(one.detach()).tensor_split(self._bounds(one.shape[dim]), dim)
            for one, dim in zip(bucket, dims, strict=True)
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

    def _part(self, whole: nn.Parameter) -> nn.Parameter | None:
        """The part of a parameter as it is now, with its gradient; ``None`` for one that is not cut."""
        dim = self._dim(whole)
        if dim is None:
            return None
        part = self._view(whole, whole, dim)
        known = self._made.get(id(whole))
        if known is not None and known[0]() is whole and _same_memory(known[1], part):
            made = known[1]
        else:
            made = nn.Parameter(part, requires_grad=whole.requires_grad)
        made.grad = None if whole.grad is None else self._view(whole.grad, whole, dim)
        return made

    @torch.no_grad()
    def _cut_state(self, state: dict[str, Any], whole: nn.Parameter) -> dict[str, Any]:
        """Return optimizer state with what is laid out like the whole parameter cut; what was cut stays."""
        return {
            slot: self.cut(value, whole)
            if isinstance(value, Tensor) and value.shape == whole.shape and not _along_dp(value)
            else value
            for slot, value in state.items()
        }

    def _dim(self, parameter: Tensor) -> int | None:
        """Along which dim a parameter is cut: one that ``tp`` does not cut, with a row for each rank."""
        if is_absent(parameter):
            return None
        taken = (
            {one.dim for one in parameter.placements if isinstance(one, Shard)}
            if isinstance(parameter, DTensor)
            else ()
        )
        return next((dim for dim, size in enumerate(parameter.shape) if dim not in taken and size >= self._size), None)

    def _view(self, whole: Tensor, like: nn.Parameter, dim: int) -> DTensor:
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


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two parts are one; under ``no_grad``."""
    places = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in map(local_part, (one, other))]
    return places[0] == places[1]


def _along_dp(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and "dp" in (tensor.device_mesh.mesh_dim_names or ())
