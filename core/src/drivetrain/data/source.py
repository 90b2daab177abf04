"""Defines what the batches of a prepared loader are read from.

:class:`~drivetrain.data.map_source.MapSource` and :class:`~drivetrain.data.stream_sources.IterableSource` read torch's
``DataLoader``, :class:`~drivetrain.data.stream_sources.StatefulSource` an object that has its own state, and
:class:`~drivetrain.data.dispatch_source.DispatchSource` distributes what the main process reads through one of these.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data.comparison import PassComparison
from drivetrain.data.orders import Reading
from drivetrain.data.plan import Cut, Position, Rows
from drivetrain.distributed import trees


class Item(NamedTuple):
    """One batch of a source.

    Args:
        batch: this rank's rows, ``None`` where it has none; in a source read for all ranks the global batch, or the
            list of every rank's batch.
        rows: what the global batch holds.
        stream: the worker it came from, where each worker reads its own stream.
        mark: the loader's own state after this batch, for loaders that keep one.
        hidden: it counts as consumed but is not yielded.
        follows: whether a batch of this rank follows; ``None`` where only reading on can tell.
        beyond: where none follows, what the global batches after this one hold for others; ``None`` for nothing.
    """

    batch: Any
    rows: Rows
    stream: int = 0
    mark: Any = None
    hidden: bool = False
    follows: bool | None = None
    beyond: Rows | None = None


class Source(ABC):
    """Reads the batches of a prepared loader.

    Args:
        cut: how units are split; ``batch_size`` 0 where the unit is a whole batch.
        dp_rank: whose batches; ``None`` reads for all ranks.
        shares: 0 where the loader distributes samples over the ranks; else, for already sharded data, the number of
            ranks, which cannot change.

    Attributes:
        round_units: units of a full global batch.
        num_streams: number of streams, one per worker; 1 without workers.
        generator: the user's generator that decides the order, if there is one.
        comparison: compares what passes read with other ranks; ``None`` where ranks may read different samples.
        reading: of a map-style dataset; a pass over it that is resumed leaves torch's state as it finds it, beyond what
            its batches draw.
        trusts_length: :meth:`length` is what an epoch has, where the sampler says it. Not once one has ended before.
    """

    num_streams = 1
    generator: torch.Generator | None = None
    comparison: PassComparison | None = None
    reading: Reading | None = None
    trusts_length = True

    def __init__(self, cut: Cut, dp_rank: int | None, shares: int) -> None:
        self.cut, self._dp_rank, self.shares = cut, dp_rank, shares
        self.round_units = cut.units

    @property
    def unit(self) -> str:
        """Unit of positions: ``"samples"`` or ``"batches"``."""
        return "samples" if self.cut.batch_size else "batches"

    @abstractmethod
    def length(self) -> int | None:
        """Units in an epoch, ``None`` when they are not known beforehand."""

    @abstractmethod
    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        """The rest of an epoch. torch's loader begins to iterate at once, with the draws that it makes.

        Args:
            position: what has been yielded, or is to be skipped.
            discard: skip this many further global batches (where their streams are known only by reading).
            resumed: this pass has begun before a checkpoint, so what its beginning draws is drawn already.
        """

    def read_to_end(self, position: Position) -> None:
        """Advance the sampler past an epoch's last batch, as torch does after that batch."""
        del position  # Nothing is drawn there, unless by a sampler.


def num_rows(batch: Any) -> int | None:
    """Rows of a batch that the user's loader made: the common size of its tensors along dim 0, else its length."""
    found = {leaf.shape[0] if leaf.dim() else 0 for _, leaf in trees.leaves(batch) if isinstance(leaf, Tensor)}
    if len(found) == 1:
        return found.pop() or None
    if not found and isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch) or None
    return None


def clone(loader: DataLoader[Any], replaced: Mapping[str, Any]) -> DataLoader[Any]:
    """A loader of the same class and settings that reads another dataset or sampler.

    torch forbids setting these attributes since a loader in use would ignore them; this one is not in use yet. Calling
    its constructor would lose what a subclass adds.
    """
    made = copy.copy(loader)
    vars(made).update(replaced, _iterator=None)
    return made


def part_of(batches: list[Any], dp_rank: int | None) -> Any:
    """One coordinate's batch of a round, ``None`` if it has none; all of them for ``None``."""
    if dp_rank is None:
        return batches
    return batches[dp_rank] if dp_rank < len(batches) else None
