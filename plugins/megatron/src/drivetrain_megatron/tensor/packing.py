"""Reorders packed parameters between the order of ranks and the model's order in the portable checkpoint.

The DTensor of a packed parameter has the shape of the whole, but its elements along the cut dim are ordered by rank:
rank 0's shares of all parts, then rank 1's. A checkpoint holds the model's own order, whatever the degree. One whole
parameter is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.placement_types import Placement

from drivetrain.api import PortableState, TensorSpec
from drivetrain_megatron.tensor.cut import CutTensor, like
from drivetrain_megatron.tensor.layout import Layout


@final
@dataclass(frozen=True)
class Packing:
    """The packed parameters of one model.

    Args:
        layouts: by the parameter's first name.
        degree: size of the axis ``tp``.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    degree: int = 1

    def layout(self, key: str) -> Layout | None:
        """Return the layout of the parameter of a key, ``model.<name>`` or ``optim.<name>.<slot>``."""
        kind, _, rest = key.partition(".")
        return self.layouts.get(rest if kind == "model" else rest.rpartition(".")[0])

    def order(self, layout: Layout, device: torch.device) -> Tensor:
        """Return for each index along the sharded dim, in the order of ranks, its index in the model's own order."""
        spans = [span for rank in range(self.degree) for span in layout.spans(rank, self.degree)]
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in spans])

    def whole(self, key: str, tensor: Tensor) -> Tensor:
        """The whole tensor in the model's own order, plain. Collective over the tensor's mesh."""
        if isinstance(tensor, CutTensor):
            return tensor.full_tensor()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        layout = self.layout(key)
        if layout is None or not isinstance(tensor, DTensor) or tuple(full.shape) != layout.shape:
            return full
        return torch.empty_like(full).index_copy_(layout.dim, self.order(layout, full.device), full)

    @torch.no_grad()
    def unpack(self, state: PortableState) -> PortableState:
        """Put packed tensors into the model's own order, in memory of their own. Collective over their meshes."""
        for key, tensor in state.tensors.items():
            if self._is_packed(key, tensor):
                assert isinstance(tensor, DTensor)
                whole = self.whole(key, tensor)
                state.tensors[key] = distribute_tensor(whole, tensor.device_mesh, _plain(tensor), src_data_rank=None)
        return state

    def unpacked_template(self, state: PortableState, saved: Mapping[str, TensorSpec]) -> PortableState:
        """New tensors in the model's own order in place of packed ones that a checkpoint has. Not collective."""
        for key, tensor in state.tensors.items():
            if key in saved and self._is_packed(key, tensor):
                assert isinstance(tensor, DTensor)
                mesh, placements = tensor.device_mesh, _plain(tensor)
                state.tensors[key] = zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
        return state

    @torch.no_grad()
    def pack(self, state: PortableState, like: Mapping[str, Tensor]) -> PortableState:
        """Put tensors of a filled template into the order of ranks. Collective over their meshes.

        Args:
            state: tensors in the model's own order.
            like: the live parameters by first name, whose places on ranks the tensors get.
        """
        for key, tensor in state.tensors.items():
            if self._is_packed(key, tensor):
                assert isinstance(tensor, DTensor)
                name = key.partition(".")[2]
                name = name if key.startswith("model.") else name.rpartition(".")[0]
                state.tensors[key] = self.part_like(key, tensor.full_tensor(), like[name])
        return state

    @torch.no_grad()
    def part_like(self, key: str, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's shard, laid out as a parameter, of a full tensor in the model's order. Not collective."""
        if not isinstance(parameter, DTensor):
            return whole
        layout = self.layout(key)
        if layout is not None:
            whole = whole.index_select(layout.dim, self.order(layout, whole.device))
        own, mesh = whole, parameter.device_mesh
        # The axis tp is the last of a mesh, and was cut first.
        for axis in reversed(range(mesh.ndim)):
            placement = parameter.placements[axis]
            dim = getattr(placement, "dim", None)
            if dim is not None:
                pieces = own.tensor_split(_edges(own.shape[dim], mesh.size(axis)), dim)
                own = pieces[mesh.get_local_rank(axis)]
        own = own.to(parameter.to_local().device).contiguous()
        if isinstance(parameter, CutTensor):
            return like(parameter, own)
        return DTensor.from_local(
            own,
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _is_packed(self, key: str, tensor: Tensor) -> bool:
        layout = self.layout(key)
        return layout is not None and isinstance(tensor, DTensor) and tuple(tensor.shape) == layout.shape


_PACKINGS: WeakKeyDictionary[nn.Module, Packing] = WeakKeyDictionary()


def remember(module: nn.Module, packing: Packing) -> None:
    """Note that parameters of this module are packed."""
    _PACKINGS[module] = packing


def packing_of(module: nn.Module) -> Packing:
    """The packed parameters of a module; empty for one that has none."""
    return _PACKINGS.get(module, Packing())


def part(module: nn.Module, whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of optimizer state of a full parameter of this module. Not collective."""
    name = next((name for name, one in module.named_parameters() if one is parameter), "")
    return packing_of(module).part_like(f"model.{name}", whole, parameter)


def _edges(length: int, ranks: int) -> list[int]:
    step = -(-length // ranks)
    return [min(step * rank, length) for rank in range(1, ranks)]


def _plain(tensor: DTensor) -> list[Placement]:
    """Placements without the strides of FSDP beside tp: any placement of the model's own order will do."""
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]
