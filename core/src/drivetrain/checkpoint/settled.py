"""What the ranks have settled about who writes what, kept for the next save of state that is laid out alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

Layout = dict[str, tuple[Any, ...]]
"""All that a rank's offer depends on: for each tensor by name dtype, whole shape and, in shards, where they lie."""


@dataclass(frozen=True)
class Settled:
    """The outcome of one planning on this rank. Holds no tensors.

    The common plan is a function of every rank's layout and of nothing else. So it holds for each later save at which
    every rank has the layout that it had then.

    Args:
        layout: of what this rank offered.
        num_ranks: how many ranks took part.
        plan: what this rank writes.
        metadata: the index of all tensors.
        sharded: names of the tensors that some rank holds in shards.
    """

    layout: Layout
    num_ranks: int
    plan: SavePlan
    metadata: Metadata
    sharded: frozenset[str]


@dataclass
class PlanMemory:
    """The plan of the save before, if there was one."""

    last: Settled | None = None

    def fits(self, layout: Layout, num_ranks: int) -> bool:
        """Whether it holds as far as this rank can tell. Not collective."""
        return self.last is not None and self.last.num_ranks == num_ranks and self.last.layout == layout


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of an offer. Not collective."""
    return {name: (tensor.dtype, tensor.shape, *_place(tensor)) for name, tensor in tensors.items()}


def in_shards(tensor: Tensor) -> bool:
    """Whether this rank holds parts of it: a DTensor, a ``FlatShard``, all that torch's planners ask for its chunks."""
    return hasattr(tensor, "__create_chunk_list__")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):  # Says the same as its list of chunks, at a tenth of the price.
        return tensor.device_mesh, tensor.placements
    if not in_shards(tensor):
        return ()
    shard: Any = tensor
    return tuple((chunk.offsets, chunk.sizes) for chunk in shard.__create_chunk_list__())
