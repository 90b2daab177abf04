"""Reads the batches of a map-style data set, in an order that is planned for all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from drivetrain.data.drawing import DrawnOrder, set_state_of, state_of
from drivetrain.data.orders import Agree, PrivateRandom, Reading, ReadNumbers, draws_nothing, num_indices
from drivetrain.data.plan import (
    Cut,
    IndexedOrder,
    Order,
    Position,
    Rows,
    derive_seed,
    plan_rounds,
    plan_samples,
    plan_split,
    round_rows,
)
from drivetrain.data.source import Item, Source, clone, part_of
from drivetrain.data.worker_data import SeededReads, WorkerInit
from drivetrain.distributed.rank_numbers import held_generators, reading_held


@final
class Planned(Iterator[Any]):
    """The planned units of one pass, for the ``DataLoader``, and their rows.

    The rows of a global batch without units for this rank are kept, and the ``DataLoader`` does not see that batch.

    Args:
        plan: units, ``None`` for nothing, and the rows of their global batch.
        has: whether a global batch of these rows holds any for this rank.
        expect: whether a batch of this rank follows after this many units, ``None`` where that is not known, and what
            else follows.
        begin: units before the plan.
        seeds: to yield ``(seed, units)``, for a :class:`SeededReads`.

    Attributes:
        given: rows of what the ``DataLoader`` has taken, in the same order, as they are read.
    """

    def __init__(
        self,
        plan: Iterator[tuple[Any, Rows]],
        has: Callable[[Rows], bool],
        expect: Callable[[int], tuple[bool | None, Rows | None]],
        begin: int,
        seeds: Iterator[int] | None = None,
    ) -> None:
        self._plan, self._has, self._expect, self._seeds = plan, has, expect, seeds
        self._ahead: deque[tuple[Any, Rows]] = deque()
        self._planned, self._ended = begin, False
        self.given: deque[Rows] = deque()

    def __next__(self) -> Any:
        while self._ahead or self._look():
            units, rows = self._ahead.popleft()
            self.given.append(rows)
            if units is not None:
                return units if self._seeds is None else (next(self._seeds), units)
        raise StopIteration

    def look_ahead(self) -> None:
        """Read the sampler as far as the next batch needs it."""
        while not (self._ahead and self._ahead[-1][0] is not None) and self._look():
            pass

    def follows(self) -> tuple[bool, Rows | None]:
        """Whether another batch of this rank follows, and else the rows of other ranks' batches."""
        beyond = None
        if self.given or self._ahead:
            for rows in (*self.given, *(rows for _, rows in self._ahead)):
                if self._has(rows):
                    return True, None
                beyond = rows
        while not self._ended:
            expected, others = self._expect(self._planned)
            if expected is not None:
                return expected, others or beyond
            if self._look():
                beyond = self._ahead[-1][1]
                if self._has(beyond):
                    return True, None
        return False, beyond

    def end(self) -> None:
        """Refer to nothing of the loader, now that the pass has ended.

        torch's iterator keeps the plan as long as its workers, which may be for ever. In a circle of references it is
        left to the garbage collector, in which its queues end before the workers hear of it: each is waited for 5 s.
        """
        self._ended = True
        self._ahead.clear()
        del self._plan, self._has, self._expect

    def _look(self) -> bool:
        following = None if self._ended else next(self._plan, None)
        if following is None:
            self._ended = True
            return False
        self._ahead.append(following)
        self._planned += following[1].units
        return True


@final
class PlannedSampler:
    """Replaces the user's sampler: gives the planned units of the pass that begins to the ``DataLoader``."""

    def __init__(self) -> None:
        self.planned: Iterator[Any] = iter(())
        self.order: Order = IndexedOrder(())

    def __deepcopy__(self, _memo: dict[int, Any]) -> PlannedSampler:
        """A new one: the plan belongs to an iteration under way."""
        return PlannedSampler()

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.order, DrawnOrder):
            self.order.begin()
        return self.planned


@final
class MapSource(Source):
    """Batches of a map-style dataset: workers fetch them directly, following the plan.

    Args:
        loader: the user's.
        reading: its order.
        cut, dp_rank, shares: see :class:`Source`.
        split: each whole batch is a global one, cut among the ranks.
        numbers: what its reads draw.
        agreement: see :meth:`Reading.open`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reading: Reading,
        cut: Cut,
        dp_rank: int | None,
        *,
        split: bool,
        shares: int,
        numbers: ReadNumbers,
        agreement: Callable[[], Agree] | None = None,
    ) -> None:
        super().__init__(cut, dp_rank, shares)
        self.reading: Reading = reading
        self._split, self._agreement = split, agreement
        self.generator = reading.generator
        if split:
            self.round_units = 1
        self._in_rounds = not cut.batch_size and not split
        self._sampler = PlannedSampler()
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._loader = clone(loader, {name: self._sampler})
        self._numbers, self._draws_nothing = numbers, draws_nothing(loader)
        self._init = WorkerInit.of(loader.worker_init_fn)
        reader = SeededReads(loader.dataset, loader.collate_fn)
        self._seeded = clone(loader, {name: self._sampler, "worker_init_fn": self._init, "dataset": reader})

    def length(self) -> int | None:
        return self.reading.length()

    def read_to_end(self, position: Position) -> None:
        if position.order is not None and position.order.begun:
            order = self.reading.open(position, self.cut.dp_size, self._agreement)
            order.take(position.consumed, position.consumed + self.cut.units)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        dataset: Any = self._loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(position.epoch)
        order = self.reading.open(position, self.cut.dp_size, self._agreement, self.comparison)
        drawn = [torch.default_generator, *filter(None, [self._loader.generator])] if resumed else []
        undo = _Undo(drawn)
        cut, begin = self.cut, position.consumed
        plan = self._plan(order, cut, begin, undo)
        expect = partial(self._expect, order, cut)
        seeds: Iterator[int] | None = None
        if self._numbers.apply and not self._draws_nothing:
            seed = self._numbers.seed(position)
            # Counted by units, so that a resumed epoch goes on in them.
            step = 1 if self._in_rounds and self._dp_rank is None else self.round_units
            seeds = (derive_seed(seed, number) for number in count(begin, step))
            self._init.seed = seed
        in_workers = self._loader.num_workers > 0
        planned = Planned(plan, self._has, expect, begin, seeds if in_workers else None)
        self._sampler.planned, self._sampler.order = planned, order
        batches: Iterator[Any] = iter(self._loader if seeds is None or not in_workers else self._seeded)
        undo()
        if seeds is not None and not in_workers:
            held = held_generators(dataset, self._loader.collate_fn)
            batches = _read_seeded(batches, seeds, held, planned.look_ahead)
        return self._items(batches, planned)

    def _items(self, batches: Iterator[Any], planned: Planned) -> Generator[Item, None, None]:
        given = planned.given
        try:
            for first in batches:
                batch, rows = first, given.popleft()
                while not self._has(rows):
                    # Nothing is fetched for these, and they come before a batch of this rank in no plan of ours.
                    yield Item(None, rows)
                    rows = given.popleft()
                if self._in_rounds and self._dp_rank is None:
                    # The other ranks' batches of this round follow; their rows are the same.
                    others = sum(size > 0 for size in rows.loaded) - 1
                    batch = [first, *(next(batches) for _ in range(others))]
                    for _ in range(others):
                        given.popleft()
                follows, beyond = planned.follows()
                yield Item(batch, rows, follows=follows, beyond=beyond)
            for rows in given:
                yield Item(None, rows)
        finally:
            planned.end()

    def _has(self, rows: Rows) -> bool:
        return any(rows.loaded) if self._dp_rank is None else rows.loaded[self._dp_rank] > 0

    def _expect(self, order: Order, cut: Cut, planned: int) -> tuple[bool | None, Rows | None]:
        """Whether a batch of this rank follows after so many units, and the rows of other ranks if none does.

        Known without reading the sampler any further, which would draw at another time than torch does.
        """
        certain = order.length is not None
        length = order.length if certain else self.reading.length() if self.trusts_length else None
        if length is None or (self._in_rounds and self._dp_rank is None):
            return None, None
        rest = length - planned
        if rest <= 0:
            return (False if certain else None), None
        if cut.batch_size:
            if rest >= cut.units:
                return True, None
            if cut.drop_last:
                return False, None
            rows = cut.rows(rest)
            if self._has(rows):
                return True, None
            return (False, rows) if certain else (None, None)
        if cut.even_batches or (not self._split and (self._dp_rank or 0) < rest):
            return True, None
        return None, None

    def _plan(self, order: Order, cut: Cut, begin: int, undo: Callable[[], None]) -> Iterator[tuple[Any, Rows]]:
        """Yield the indices for the ``DataLoader``, or ``None``, and the rows of the global batch."""
        undo()
        if cut.batch_size or self._split:
            for units, rows in (
                plan_split(order, cut.dp_size, begin, self._dp_rank, even_batches=cut.even_batches)
                if self._split
                else plan_samples(order, cut, begin, self._dp_rank)
            ):
                yield units or None, rows
            return
        for batches, real in plan_rounds(order, cut, begin):
            rows = round_rows([num_indices(batch) for batch in batches], real, cut.dp_size)
            if self._dp_rank is None:
                yield from ((batch, rows) for batch in batches)
            else:
                yield part_of(batches, self._dp_rank), rows


@final
class _Undo:
    """Puts generators back to where they are now, once: a pass that is resumed has drawn before the checkpoint."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._states = [(each, state_of(each)) for each in generators]

    def __call__(self) -> None:
        for generator, state in self._states:
            set_state_of(generator, state)
        self._states = []


_NOTHING = object()


def _read_seeded(
    batches: Iterator[Any], seeds: Iterator[int], held: list[Any], look_ahead: Callable[[], None]
) -> Iterator[Any]:
    """Read each batch in this process under random numbers of its own; the script's generators do not move."""
    for seed in seeds:
        look_ahead()  # The sampler draws from the script's generators.
        with PrivateRandom(seed), reading_held(held, seed):
            batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return
        yield batch
