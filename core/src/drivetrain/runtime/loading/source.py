"""Where a prepared loader's batches come from: one small interface, and the source for map-style datasets."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data.order import Order
from drivetrain.data.plan import Cut, Rows, plan_rounds, plan_samples, plan_split, round_rows
from drivetrain.data.position import Identity, Position
from drivetrain.runtime import trees
from drivetrain.runtime.loading.reading import Reading


class Item(NamedTuple):
    """One batch of a source.

    Args:
        batch: this rank's rows; in a source read for all ranks the global batch, or the list of every rank's batch.
        rows: what the global batch holds.
        stream: the worker it came from, where workers read streams of their own.
        mark: the loader's own state after this batch, for loaders that keep one.
        hidden: it counts as consumed but is not shown.
        absent: the ranks that come first have a batch here, and this rank has none.
    """

    batch: Any
    rows: Rows
    stream: int = 0
    mark: Any = None
    hidden: bool = False
    absent: bool = False


@dataclass(frozen=True)
class Start:
    """Where a pass begins.

    Args:
        seed: of the order.
        position: what has been shown, or is to be passed over.
        even_batches: as in :class:`~drivetrain.data.plan.Cut`.
        discard: pass over so many global batches more (where only reading tells whose streams they come from).
        mark: units consumed when the loader's own state was taken, and that state, for loaders that keep one.
    """

    seed: int
    position: Position
    even_batches: bool
    discard: int = 0
    mark: tuple[int, Any] | None = None


class Source(Protocol):
    """What :class:`~drivetrain.runtime.loading.loader.PreparedDataLoader` iterates."""

    @property
    def cut(self) -> Cut:
        """How units are shared out."""

    @property
    def round_units(self) -> int:
        """Units of a full global batch."""

    @property
    def num_streams(self) -> int:
        """Streams that workers read each for itself; 1 where there are none."""

    def identity(self) -> Identity:
        """What its positions mean."""

    def open(self, start: Start) -> Generator[Item, None, None]:
        """The rest of an epoch."""


def num_rows(batch: Any) -> int | None:
    """Rows of a batch that somebody else made: the size along dim 0 that its tensors agree on, else its length."""
    found = {leaf.shape[0] if leaf.dim() else 0 for leaf in _tensors(batch)}
    if len(found) == 1:
        return found.pop() or None
    if not found and isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch) or None
    return None


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    else:
        for _, child in trees.children(node) or ():
            yield from _tensors(child)


def clone(loader: DataLoader[Any], replaced: Mapping[str, Any]) -> DataLoader[Any]:
    """A loader of the same class with the same settings, whatever they are, that reads something else.

    Torch forbids setting these attributes since a loader in use would not follow; this one is not in use yet. Building
    it anew by its constructor would lose what a subclass adds.
    """
    made = copy.copy(loader)
    vars(made).update(replaced, _iterator=None)
    return made


@final
class PlannedSampler:
    """Stands in for the user's sampler: hands the planned units to the ``DataLoader`` and notes what they were.

    A global batch without units for this rank is noted, and the ``DataLoader`` does not hear of it.
    """

    def __init__(self) -> None:
        self._plan: Iterator[tuple[Any, Rows]] = iter(())
        self._notes: deque[Rows] = deque()

    def arm(self, plan: Iterator[tuple[Any, Rows]]) -> deque[Rows]:
        """Set what the next iteration yields; the notes come in the same order."""
        self._plan, self._notes = plan, deque()
        return self._notes

    def __iter__(self) -> Iterator[Any]:
        plan, note = self._plan, self._notes.append
        for units, rows in plan:
            note(rows)
            if units is not None:
                yield units


@final
class MapSource:
    """Batches of a map-style dataset: workers fetch them directly, following the plan.

    Args:
        loader: the user's.
        reading: its order.
        cut: how units are shared out; ``batch_size`` 0 means whole batches.
        dp_rank: whose batches; ``None`` reads for all ranks.
        split: each whole batch is a global one, cut among the ranks.
        shares: see :class:`~drivetrain.data.position.Identity`.
    """

    num_streams = 1

    def __init__(
        self, loader: DataLoader[Any], reading: Reading, cut: Cut, dp_rank: int | None, *, split: bool, shares: int
    ) -> None:
        self.cut, self._dp_rank = cut, dp_rank
        self._reading, self._split, self._shares = reading, split, shares
        self.round_units = 1 if split else cut.units
        self._in_rounds = not cut.batch_size and not split
        self._sampler = PlannedSampler()
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._loader = clone(loader, {name: self._sampler})

    def identity(self) -> Identity:
        unit = "samples" if self.cut.batch_size else "batches"
        return Identity(unit, length=self._reading.length(), shares=self._shares)

    def open(self, start: Start) -> Generator[Item, None, None]:
        dataset: Any = self._loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(start.position.epoch)
        cut = replace(self.cut, even_batches=start.even_batches)
        order = self._reading.open(start.seed, start.position.epoch, cut.dp_size)
        notes = self._sampler.arm(self._plan(order, cut, start.position.consumed))
        batches = iter(self._loader)
        for first in batches:
            batch, rows = first, notes.popleft()
            if self._in_rounds and self._dp_rank is None:
                # The other ranks' batches of this round follow; their notes say the same.
                others = sum(size > 0 for size in rows.loaded) - 1
                batch = [first, *(next(batches) for _ in range(others))]
                for _ in range(others):
                    notes.popleft()
            yield Item(batch, rows)
        for rows in notes:
            yield Item(None, rows, absent=True)

    def _plan(self, order: Order, cut: Cut, begin: int) -> Iterator[tuple[Any, Rows]]:
        if cut.batch_size:
            yield from _or_none(plan_samples(order, cut, begin, self._dp_rank))
        elif self._split:
            yield from _or_none(plan_split(order, cut.dp_size, begin, self._dp_rank, even_batches=cut.even_batches))
        else:
            for batches, real in plan_rounds(order, cut, begin):
                rows = round_rows([self._reading.rows(batch) for batch in batches], real, cut.dp_size)
                if self._dp_rank is None:
                    yield from ((batch, rows) for batch in batches)
                else:
                    yield (batches[self._dp_rank] if self._dp_rank < len(batches) else None), rows


def _or_none(plan: Iterator[tuple[list[Any], Rows]]) -> Iterator[tuple[list[Any] | None, Rows]]:
    return ((units or None, rows) for units, rows in plan)
