"""Reads the batches of a prepared loader: from map-style and iterable datasets, stateful loaders, or the main process.

:class:`MapSource` and :class:`IterableSource` read torch's ``DataLoader``, :class:`StatefulSource` an object that has
its own state, and :class:`DispatchSource` distributes what the main process reads through one of these.
"""

from __future__ import annotations

import base64
import copy
import random
import signal
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

from drivetrain.backend import Backend
from drivetrain.data.comparison import Content, FirstSamples, PassComparison
from drivetrain.data.drawing import (
    DrawnOrder,
    ScriptUnits,
    TorchUnits,
    generators,
    set_state_of,
    state_of,
)
from drivetrain.data.plan import (
    Cut,
    IndexedOrder,
    Order,
    Position,
    Rows,
    StreamedOrder,
    derive_seed,
    plan_rounds,
    plan_samples,
    plan_split,
    random_order,
    round_rows,
    split_total,
)
from drivetrain.distributed import trees
from drivetrain.distributed.rank_numbers import (
    Held,
    held_generators,
    host_digest,
    numbers_coordinate,
    reading_held,
    seed_everything,
    seed_generator,
)
from drivetrain.distributed.rng import draws_alike
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.launch.worker import SIGNALS

# ---- random state ---------------------------------------------------------------------------------------------------


@final
class PrivateRandom:
    """Python's, numpy's and torch's (CPU) global random state, swapped in on entry and out on exit.

    Code inside draws from a stream that depends on the seed alone, across any number of entries. Code outside is
    unaffected, with one exception: the second of a pair of normal numbers that numpy's legacy functions keep for the
    next call is drawn anew after an entry. (Numpy's generators are exchanged rather than copied, at a hundredth of the
    cost; an entry costs about ten microseconds.)
    """

    def __init__(self, seed: int) -> None:
        bits = np.random.RandomState(seed % 2**32)._bit_generator  # noqa: SLF001 (what get_bit_generator returns)
        self._other = random.Random(seed).getstate(), torch.Generator().manual_seed(seed).get_state(), bits

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        numpy: Any = np.random
        before = random.getstate(), torch.default_generator.get_state(), numpy.get_bit_generator()
        random.setstate(self._other[0])
        torch.default_generator.set_state(self._other[1])
        numpy.set_bit_generator(self._other[2])
        self._other = before


def reseed(sampler: Any, seed: int) -> None:
    """Give every generator that a sampler holds a seed of its own."""
    for index, generator in enumerate(generators(sampler)):
        seed_generator(generator, derive_seed("generator", seed, index))


@final
class ReadNumbers:
    """Seeds of the random numbers that a loader's reads draw, where a run has several data-parallel coordinates.

    Args:
        coordinate: of this rank; ``None`` where the numbers are those of plain torch.
    """

    def __init__(self, coordinate: int | None) -> None:
        self._coordinate = coordinate

    @property
    def apply(self) -> bool:
        """Whether reads draw by a seed: there are several coordinates, and the script does not want equal numbers."""
        return self._coordinate is not None and not draws_alike()

    def seed(self, position: Position) -> int:
        """The seed of an epoch on this rank."""
        assert self._coordinate is not None
        assert position.numbers is not None, "set where the pass begins"
        return derive_seed(
            "reads", position.seed, position.epoch, position.numbers, numbers_coordinate(self._coordinate)
        )


_DRAW_NOTHING: tuple[Any, ...] = (TensorDataset, range, list, tuple)


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether reading a batch certainly draws no random number."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _DRAW_NOTHING and loader.collate_fn in (default_collate, default_convert)


# ---- samplers -------------------------------------------------------------------------------------------------------

Agree = Callable[[Any], Any]
"""See :meth:`drivetrain.data.drawing.Board.agree`, for one pass."""


@final
class Reading:
    """Reads the order of a map-style loader.

    torch's random samplers are drawn as torch draws them, from their generator or from torch's global state. A
    sequential one, a list and a ``DistributedSampler`` are known without. Any other sampler is iterated, when torch
    would iterate it.

    Args:
        loader: the user's.
        seeded: a ``RandomSampler`` without a generator gives an order that follows from the seed and the epoch.

    Attributes:
        batch_size: rows of the script's batch, 0 where the unit is a whole batch.
        drop_last: leave out an incomplete batch.
    """

    def __init__(self, loader: DataLoader[Any], *, seeded: bool) -> None:
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.batch_size, self.drop_last = 0, False
        self._chain = [sampler]
        # torch calls iter() on what it has at once, and on what its own batch sampler holds with the first batch.
        self._eager = True
        if loader.batch_sampler is not None and _is_plain(sampler, BatchSampler):
            self.batch_size, self.drop_last, sampler = sampler.batch_size, sampler.drop_last, sampler.sampler
            self._chain.append(sampler)
            self._eager = False
        self._sampler = sampler
        self._seeded = seeded and _is_plain(sampler, RandomSampler) and sampler.generator is None
        if _is_plain(sampler, DistributedSampler):
            _say_replaced(sampler)
        self._legacy = _LegacyOrders(sampler, loader)
        held = [*generators(sampler), loader.generator]
        self.generators: list[Any] = list({id(each): each for each in held if each is not None}.values())
        """Lists the script's generators that the order or the seed of the workers is drawn from."""

    @property
    def generator(self) -> torch.Generator | None:
        """The first of torch's kind among them."""
        return next((each for each in self.generators if isinstance(each, torch.Generator)), None)

    def length(self) -> int | None:
        """Units in an epoch, ``None`` when they are not known beforehand."""
        if _is_plain(self._sampler, SequentialSampler):
            return len(self._sampler.data_source)
        if _is_plain(self._sampler, DistributedSampler):
            return len(self._sampler.dataset)
        return _length(self._sampler)

    def open(
        self,
        position: Position,
        keep: int,
        agreement: Callable[[], Agree] | None,
        comparison: PassComparison | None = None,
    ) -> Order:
        """The order of the epoch of this position.

        Args:
            position: its ``order`` is what the order follows from, and is added to.
            keep: how many of its first units may be asked for again.
            agreement: called where the order is drawn, see :class:`drivetrain.data.drawing.DrawnOrder`.
            comparison: is told what a sampler of the script's own gives.
        """
        sampler, log = self._sampler, position.order
        if position.legacy:
            return self._legacy.open(position, keep)
        if _is_plain(sampler, SequentialSampler):
            return IndexedOrder(range(len(sampler.data_source)))
        if isinstance(sampler, (list, tuple, range)):
            return IndexedOrder(sampler)
        if _is_plain(sampler, DistributedSampler):
            return IndexedOrder(_of_all_replicas(sampler))
        if self._seeded:
            return _shuffled(position, sampler)
        assert log is not None, "set where the pass begins"
        if type(sampler) in _DRAWING:
            late = comparison if _draws_late(sampler) else None
            compared = None if late is None else late.order(position.epoch)
            return DrawnOrder(TorchUnits(sampler), log, keep, len(sampler), agreement, compared=compared)
        compared = None if comparison is None else comparison.order(position.epoch)
        return DrawnOrder(ScriptUnits(sampler), log, keep, None, agreement, eager=self._eager, compared=compared)

    def states(self) -> list[Any]:
        """States of :attr:`generators`."""
        return [state_of(each) for each in self.generators]

    def restore_states(self, states: Sequence[Any]) -> bool:
        """Set what :meth:`states` returned; ``False`` where the generators are of another number or kind."""
        if [_shape(state) for state in states] != [_shape(state) for state in self.states()]:
            return False
        for generator, state in zip(self.generators, states, strict=True):
            set_state_of(generator, state)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the samplers, as scripts do."""
        for sampler in self._chain:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def epochs(self) -> list[int | None]:
        """The number that each sampler has as ``epoch``."""
        found = [getattr(sampler, "epoch", None) for sampler in self._chain]
        return [epoch if type(epoch) is int else None for epoch in found]

    def restore_epochs(self, epochs: Sequence[int | None]) -> None:
        """Set what :meth:`epochs` returned."""
        for sampler, epoch, mine in zip(self._chain, epochs, self.epochs(), strict=False):
            if epoch is None or mine is None:
                continue
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
            else:
                sampler.epoch = epoch


def _shape(state: Any) -> Any:
    """Return a key of the kind of a generator's state."""
    return len(state) if isinstance(state, bytes | tuple) else type(state).__name__


def _num_indices(unit: Any) -> int | None:
    """Rows of a batch by its indices; ``None`` for a single index, for which the dataset makes the batch."""
    is_batch = getattr(unit, "ndim", 0) == 1 or (isinstance(unit, Sequence) and not isinstance(unit, (str, bytes)))
    return len(unit) if is_batch else None


def _is_plain(sampler: Any, kind: type) -> bool:
    """Whether the sampler is of exactly this class, or of torchdata's equivalent.

    A subclass may behave differently, so it is iterated instead.
    """
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


@final
class _LegacyOrders:
    """Orders as in states of formats 1 and 2, so that a run goes on as it began: by the seed and the epoch.

    In format 2, torch's samplers with a generator give what torch draws from the state that it had at ``prepare``.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any]) -> None:
        self._sampler = sampler
        draws = type(sampler) in _DRAWING and sampler.generator is not None
        self._draws = _Draws(sampler, loader) if draws else None

    def open(self, position: Position, keep: int) -> Order:
        """The order of an epoch."""
        sampler = self._sampler
        if position.generator is not None and self._draws is not None:
            return self._draws.epoch(position.generator, position.epoch)
        if _is_plain(sampler, SequentialSampler):
            return IndexedOrder(range(len(sampler.data_source)))
        if _is_plain(sampler, RandomSampler):
            return _shuffled(position, sampler)
        if _is_plain(sampler, DistributedSampler):
            size = len(sampler.dataset)
            if not sampler.shuffle:
                return IndexedOrder(range(size))
            return IndexedOrder(random_order(derive_seed(position.seed, sampler.seed), position.epoch, size))
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(position.epoch)
        own = derive_seed("sampler", position.seed, position.epoch)
        reseed(sampler, own)
        guard = PrivateRandom(own)
        with guard:
            units = iter(sampler)
            if _length(sampler) is not None:
                return IndexedOrder(list(units))
        return StreamedOrder(units, keep, guard)


def _shuffled(position: Position, sampler: RandomSampler) -> Order:
    size, wanted = len(sampler.data_source), sampler.num_samples
    return IndexedOrder(
        random_order(position.seed, position.epoch, size, num_samples=wanted, replacement=sampler.replacement)
    )


@final
class _Draws:
    """Numbers that torch draws from a generator in each complete epoch of a loader.

    ``DataLoader`` draws a seed for its workers when an iteration begins, and the sampler the order. The epoch
    after the one that was asked for last costs one draw; any other is reached by drawing all before it.

    Args:
        sampler: one of :data:`_DRAWING`, with a generator.
        loader: that reads it.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any]) -> None:
        self._sampler = sampler
        self._seeds_workers = loader.generator is sampler.generator
        self._keeps_workers = loader.persistent_workers
        self._start: int | str | None = None
        self._generator = torch.Generator()
        self._drawn = 0

    def epoch(self, start: int | str, epoch: int) -> Order:
        """The order of an epoch, for a generator that had this state before the first one."""
        if start != self._start or epoch < self._drawn:
            self._start, self._drawn = start, 0
            if isinstance(start, int):
                self._generator.manual_seed(start)
            else:
                self._generator.set_state(torch.frombuffer(bytearray(base64.b64decode(start)), dtype=torch.uint8))
        order = self._draw()
        while self._drawn <= epoch:
            order = self._draw()
        return IndexedOrder(order)

    def _draw(self) -> Any:
        sampler, generator = self._sampler, self._generator
        if self._seeds_workers and not (self._keeps_workers and self._drawn):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        self._drawn += 1
        if type(sampler) is RandomSampler and not sampler.replacement and (size := len(sampler.data_source)):
            # The commonest, without a Python number for each sample. One more permutation than is needed where it comes
            # out even: torch draws it too.
            wanted = sampler.num_samples
            drawn = [torch.randperm(size, generator=generator) for _ in range(wanted // size + 1)]
            return torch.cat(drawn)[:wanted].numpy()
        own = copy.copy(sampler)
        own.generator = generator
        return list(own)


_DRAWING: tuple[type, ...] = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch that draw an epoch's order from their generator when the epoch begins."""


def _draws_late(sampler: Any) -> bool:
    """Whether it draws from a generator of the script's while an epoch goes on."""
    random = type(sampler) is RandomSampler and sampler.generator is not None
    return random and (sampler.replacement or sampler.num_samples > len(sampler.data_source))


def _say_replaced(sampler: DistributedSampler[Any]) -> None:
    warnings.warn(
        "this DataLoader has a DistributedSampler, which would share its samples out a second time; it is replaced by "
        f"the whole dataset, {'shuffled' if sampler.shuffle else 'in order'}. Leave it out: DataLoader(dataset, "
        f"shuffle={sampler.shuffle}).",
        UserWarning,
        stacklevel=6,
    )


def _of_all_replicas(sampler: DistributedSampler[Any]) -> Sequence[int] | np.ndarray:
    """Return what the sampler gives to a single replica in the epoch that it is in."""
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return range(size)
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    order: np.ndarray = torch.randperm(size, generator=generator).numpy()
    return order


# ---- sources --------------------------------------------------------------------------------------------------------


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


def _length(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") else None


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
class SeededReads(Dataset[Any]):
    """Reads the user's dataset in a worker, each batch under random numbers of its own.

    Args:
        dataset: the user's.
        collate: the user's.
    """

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate
        self.seeds = True
        """Off where the user's ``worker_init_fn`` has seeded generators itself: the streams then go on from there."""
        self._held: Held | None = None

    def __getitems__(self, tagged: tuple[int, Any]) -> Any:
        units = self._begin(tagged)
        several = getattr(self.dataset, "__getitems__", None)
        return several(units) if several else [self.dataset[unit] for unit in units]

    def __getitem__(self, tagged: tuple[int, Any]) -> Any:
        return self.dataset[self._begin(tagged)]

    def _begin(self, tagged: tuple[int, Any]) -> Any:
        seed, units = tagged
        if self.seeds:
            if self._held is None:
                self._held = Held(self.dataset, self.collate)
            seed_everything(seed)
            self._held.seed(seed)
        return units


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
            rows = round_rows([_num_indices(batch) for batch in batches], real, cut.dp_size)
            if self._dp_rank is None:
                yield from ((batch, rows) for batch in batches)
            else:
                yield _part_of(batches, self._dp_rank), rows


@final
class StatefulSource(Source):
    """Batches of an object with ``__iter__``, ``state_dict`` and ``load_state_dict``.

    Its state is taken after every global batch, before the next is read, and saved with the position. A loader that is
    marked as already sharded has a state on each rank.

    Args:
        loader: the user's.
        cut, dp_rank, shares: see :class:`Source`.
    """

    def __init__(self, loader: Any, cut: Cut, dp_rank: int | None, *, shares: int) -> None:
        super().__init__(cut, dp_rank, shares)
        self._loader = loader

    def length(self) -> int | None:
        return _length(self._loader)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        loader, wanted, read = self._loader, position.consumed, 0
        if callable(getattr(loader, "set_epoch", None)):
            loader.set_epoch(position.epoch)
        if position.mark is not None:
            read, state = position.mark
            if read > wanted:
                raise UsageError(
                    f"{type(loader).__name__} was restored after batch {read} and cannot go back to batch {wanted}",
                    cure="Leave skip_first_batches out: load_state restored the position.",
                )
            loader.load_state_dict(state)
        # Skipped batches are not kept, except the first, which may be needed to fill the last round.
        order, first = StreamedOrder(iter(loader), self.cut.dp_size), Content()
        for batches, real in plan_rounds(order, self.cut, wanted - read):
            rows = round_rows([num_rows(batch) for batch in batches], real, self.cut.dp_size)
            if self.comparison is not None and not first.num_exact:
                first.add(batches)
                # Transforms of such a loader draw from numbers of its own.
                if first.varies:
                    self.comparison.samples(first.exact, position.epoch, position.consumed)
            yield Item(_part_of(batches, self._dp_rank), rows, mark=loader.state_dict())


@final
class _Undo:
    """Puts generators back to where they are now, once: a pass that is resumed has drawn before the checkpoint."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._states = [(each, state_of(each)) for each in generators]

    def __call__(self) -> None:
        for generator, state in self._states:
            set_state_of(generator, state)
        self._states = []


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


_NOTHING = object()


def _part_of(batches: list[Any], dp_rank: int | None) -> Any:
    """One coordinate's batch of a round, ``None`` if it has none; all of them for ``None``."""
    if dp_rank is None:
        return batches
    return batches[dp_rank] if dp_rank < len(batches) else None


@final
class WorkerInit:
    """Initializes a loader's workers: runs the user's ``worker_init_fn`` as without Drivetrain.

    Args:
        function: the user's own.
        ignores_signal: the worker ignores the first SIGTERM or SIGINT. Schedulers send SIGTERM to all processes of a
            job, and a terminal sends SIGINT, loader workers included. Those that must really end get a second signal:
            from torch when it gives up on one, then from Python when it exits.

    Attributes:
        seed: of the epoch's random numbers on this rank; ``None``: those that torch gave to the worker.
    """

    def __init__(self, function: Callable[[int], None] | None, *, ignores_signal: bool = False) -> None:
        self._function, self._ignores_signal = function, ignores_signal
        self.seed: int | None = None

    @classmethod
    def of(cls, function: Callable[[int], None] | None) -> WorkerInit:
        """Another one for the same function, which may be one of these."""
        if isinstance(function, WorkerInit):
            return copy.copy(function)
        return cls(function)

    def __call__(self, worker: int) -> None:
        if self._ignores_signal:
            for number in SIGNALS:  # here, since torch sets handlers when the process has started
                signal.signal(number, _heed_next_signal)
        info: Any = get_worker_info()
        reader = info.dataset
        if isinstance(reader, StreamShard | SeededReads):
            # WorkerInfo refuses assignment to protect users; this restores what they expect in it.
            object.__setattr__(info, "dataset", reader.dataset)
        if self.seed is not None:
            own = derive_seed("worker", self.seed, worker)
            object.__setattr__(info, "seed", own)
            seed_everything(own)
        if self._function is None:
            return
        if not isinstance(reader, SeededReads):
            self._function(worker)
            return
        before, held = host_digest(), Held(reader.dataset, reader.collate)
        self._function(worker)
        reader.seeds = host_digest() == before and not held.changed


def _heed_next_signal(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


_NO_BATCH = -1


@final
class StreamShard(IterableDataset[Any]):
    """Reads the user's dataset, in this process or in a worker, and yields ``(stream, real, sizes, batch, samples)``.

    ``real`` is the number of units that are not repeated, ``sizes`` are the rows of each rank's batch where the dataset
    yields whole batches, ``samples`` is the digest of the first ones where it is known.

    It splits and collates by itself, since only the reader of the stream knows which samples are repeated. Each worker
    reads its own stream, as in torch, the same on every rank.

    A whole global batch is held in memory: how the last one is distributed depends on where the stream ends.

    Args:
        dataset: the user's.
        cut: how units are split.
        dp_rank: whose batches; ``None`` keeps all ranks' (for dispatch).
        collate: the user's.
        num_streams: number of workers, at least 1.
        seed_workers: seed a worker's random state; not where the user's ``worker_init_fn`` does.
    """

    def __init__(
        self,
        dataset: Any,
        cut: Cut,
        dp_rank: int | None,
        collate: Callable[[Any], Any],
        num_streams: int,
        *,
        seed_workers: bool,
    ) -> None:
        self.dataset, self.cut, self.dp_rank = dataset, cut, dp_rank
        self._collate, self._seed_workers = collate, seed_workers
        self._collate_draws = collate not in (default_collate, default_convert)
        # Persistent workers hold a copy of this object from the first epoch; this memory tells them of later ones.
        self._control = torch.zeros(5 + num_streams, dtype=torch.int64)

    def share(self) -> None:
        """Make :meth:`begin_at` reach the workers."""
        self._control.share_memory_()  # type: ignore[no-untyped-call]

    def begin_at(
        self, position: Position, skips: tuple[int, ...], *, even_batches: bool, numbers: int | None
    ) -> None:
        """Set where the next iteration begins.

        Args:
            position: of the loader.
            skips: units to skip in each stream.
            even_batches: see :class:`Cut`.
            numbers: seed of what ``collate_fn`` draws on this rank; ``None`` where it draws from the reader's state.
        """
        told = [position.seed, position.epoch, position.turn, even_batches, -1 if numbers is None else numbers, *skips]
        self._control.copy_(torch.tensor(told))

    def __iter__(self) -> Iterator[tuple[int, int, list[int | None], Any, int | None]]:
        info = get_worker_info()
        stream = 0 if info is None else info.id
        seed, epoch, turn, even, numbers, *skips = self._control.tolist()
        skip = skips[stream]
        if stream < turn:
            # torch begins with worker 0; it gets batches to skip until the stream that was next.
            yield stream, _NO_BATCH, [], None, None
        own = derive_seed("stream", seed, epoch, stream)
        guard: AbstractContextManager[None] | None = None
        if info is None:
            guard = PrivateRandom(own)
        elif self._seed_workers:
            random.seed(own)
            torch.default_generator.manual_seed(own)
            np.random.seed(own % 2**32)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        reseed(self.dataset, own)
        cut = replace(self.cut, even_batches=bool(even))
        first = FirstSamples(floats=info is None or self._seed_workers)
        order = StreamedOrder(first.watch(_deferred(self.dataset)), cut.dp_size, guard)
        collate = self._collate
        if numbers >= 0 and self._collate_draws:
            # All ranks read one stream under one state; a collate function sees this rank's rows only.
            seeds = (derive_seed(numbers, stream, number) for number in count(skip, cut.units))
            collate = lambda batch: _under(next(seeds), self._collate, batch)  # noqa: E731
        if cut.batch_size:
            for mine, rows in plan_samples(order, cut, skip, self.dp_rank):
                yield stream, rows.units, [], collate(mine) if mine else None, first.take()
            return
        for batches, real in plan_rounds(order, cut, skip):
            sizes = [num_rows(batch) for batch in batches]
            mine = _part_of(batches, self.dp_rank)
            if self.dp_rank is None:
                mine = [collate(batch) for batch in batches]
            elif self.dp_rank < len(batches):
                mine = collate(mine)
            yield stream, real, sizes, mine, first.take()


def _under(seed: int, function: Callable[[Any], Any], batch: Any) -> Any:
    with PrivateRandom(seed):
        return function(batch)


def _deferred(dataset: Any) -> Iterator[Any]:
    # The user's __iter__ may draw its shuffle at once; here it runs with the first read, inside the guard.
    yield from dataset


def _as_is(item: Any) -> Any:
    return item


@final
class IterableSource(Source):
    """Batches of an ``IterableDataset``.

    Args:
        loader: the user's.
        cut, dp_rank, shares: see :class:`Source`.
        numbers: what its ``collate_fn`` draws.
        ignores_signals: its workers ignore the first signal.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        cut: Cut,
        dp_rank: int | None,
        *,
        shares: int,
        numbers: ReadNumbers,
        ignores_signals: bool = False,
    ) -> None:
        super().__init__(cut, dp_rank, shares)
        self._numbers = numbers
        self.num_streams = max(loader.num_workers, 1)
        self._dataset = loader.dataset
        held = [each for each in generators(loader.dataset) if isinstance(each, torch.Generator)]
        self.generator = held[0] if held else loader.generator
        init: Any = loader.worker_init_fn
        collate: Any = loader.collate_fn
        self._shard = StreamShard(loader.dataset, cut, dp_rank, collate, self.num_streams, seed_workers=init is None)
        replaced: dict[str, Any] = {"dataset": self._shard, "batch_size": None, "batch_sampler": None}
        replaced |= {"drop_last": False, "collate_fn": _as_is, "_IterableDataset_len_called": None}
        if loader.num_workers:
            self._shard.share()
            replaced["worker_init_fn"] = WorkerInit(init, ignores_signal=ignores_signals)
        self._loader = clone(loader, replaced)

    def length(self) -> int | None:
        return _length(self._dataset)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        cut = self.cut
        skips = (position.consumed,) if self.num_streams == 1 else position.streams or (0,) * self.num_streams
        numbers = self._numbers.seed(position) if self._numbers.apply else None
        self._shard.begin_at(position, skips, even_batches=cut.even_batches, numbers=numbers)
        return self._items(iter(self._loader), cut, discard, position.epoch)

    def _items(self, batches: Iterator[Any], cut: Cut, discard: int, epoch: int) -> Generator[Item, None, None]:
        for stream, real, sizes, batch, samples in batches:
            if real == _NO_BATCH:
                continue
            if samples is not None and self.comparison is not None:
                self.comparison.samples(samples, epoch, stream)
            rows = cut.rows(real) if cut.batch_size else round_rows(sizes, real, cut.dp_size)
            yield Item(batch, rows, stream, hidden=discard > 0)
            discard -= 1


SliceFunction = Callable[..., Any]
"""``slice_fn(batch, tensor_slice, process_index=, num_processes=)`` returns one rank's part of a global batch."""


@final
class DispatchSource(Source):
    """Batches that global rank 0 reads; collective over all ranks, one broadcast for each.

    Other ranks never access the dataset. An exception of the reader is raised on every rank.

    Args:
        inner: reads for all ranks; used on the main process.
        backend: for the broadcast.
        slice_fn: splits a global batch; ``None``: :func:`slice_rows`.
    """

    def __init__(self, inner: Source, backend: Backend, slice_fn: SliceFunction | None) -> None:
        self._inner, self._backend, self._slice = inner, backend, slice_fn
        super().__init__(inner.cut, None, shares=0)
        self.round_units, self.num_streams = inner.round_units, inner.num_streams
        self.generator, self.reading = inner.generator, inner.reading

    @property
    def cut(self) -> Cut:
        """The inner source's."""
        return self._inner.cut

    @cut.setter
    def cut(self, value: Cut) -> None:
        self._inner.cut = value

    def length(self) -> int | None:
        return self._inner.length()

    def read_to_end(self, position: Position) -> None:
        if self._backend.topology.rank == 0:
            self._inner.read_to_end(position)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        if self._backend.topology.rank != 0:
            return self._shown(None)
        return self._shown(self._read(self._inner.open(position, discard, resumed=resumed)))

    def _shown(self, reader: Iterator[tuple[Item | None, bool]] | None) -> Generator[Item, None, None]:
        topology, backend = self._backend.topology, self._backend
        last = False
        # Every rank receives the same messages between the same batches, a rank without rows in the last one too.
        while not last:
            item, last = backend.broadcast_object(None if reader is None else next(reader))
            if isinstance(item, str):
                raise DrivetrainError(
                    f"the main process could not read the next batch ({item})",
                    whose="rank 0",
                    cure="Its own traceback says where.",
                )
            if item is not None:
                part = self._part(item, topology.dp_rank, topology.dp_size)
                yield item._replace(batch=part, follows=None, beyond=None)

    def _read(self, items: Iterator[Item]) -> Iterator[tuple[Item | None, bool]]:
        """``(item, nothing follows)`` until the end."""
        try:
            following = next(items, None)
            if following is None:
                yield None, True
            while following is not None:
                item, following = following, None
                if item.follows is None:
                    following = next(items, None)
                    yield item, following is None
                    continue
                # Read on when the batch is asked for, as torch does.
                yield item, not item.follows
                following = next(items, None)
                if following is None and item.follows:
                    self._inner.trusts_length = False
                    yield None, True
        except Exception as error:
            # The others wait for a batch; tell them why there is none before this rank raises.
            self._backend.broadcast_object((f"{type(error).__name__}: {error}", True))
            raise

    def _part(self, item: Item, dp_rank: int, dp_size: int) -> Any:
        if not item.rows.loaded[dp_rank]:
            return None
        if item.rows.whole:
            return item.batch[dp_rank]
        begin = sum(item.rows.loaded[:dp_rank])
        part = slice(begin, begin + item.rows.loaded[dp_rank])
        if self._slice is None:
            return slice_rows(item.batch, part, item.rows)
        return self._slice(item.batch, part, process_index=dp_rank, num_processes=dp_size)


def slice_rows(batch: Any, part: slice, rows: Rows) -> Any:
    """Cut every tensor, and every list of plain values that has an element for each row, along its rows."""
    total = sum(rows.loaded)
    if isinstance(batch, Tensor):
        return batch[part].clone() if batch.dim() and batch.shape[0] == total else batch
    inner = trees.children(batch)
    if inner is None:
        return batch
    if len(inner) == total and isinstance(batch, list) and not any(isinstance(each, Tensor) for each in batch):
        return batch[part]
    return trees.honor_type(batch, [slice_rows(child, part, rows) for _, child in inner])


def make_source(
    loader: Any,
    config: DataLoaderConfiguration,
    dp_size: int,
    dp_rank: int | None,
    *,
    shares: int,
    ignores_signals: bool,
    coordinate: int | None = None,
    agreement: Callable[[], Agree] | None = None,
) -> Source:
    """The source of a loader.

    Args:
        loader: the user's.
        config: how samples are shared out.
        dp_size: among how many ranks.
        dp_rank, shares: see :class:`Source`.
        ignores_signals: the loader's workers ignore the first signal.
        coordinate: whose random numbers reads draw, see :class:`ReadNumbers`.
        agreement: of the ranks that read one order, see :meth:`Reading.open`.

    Raises:
        UsageError: the settings do not fit the loader.
    """
    splits = config.split_batches and dp_size > 1
    if not isinstance(loader, DataLoader):
        _refuse_split(splits, type(loader).__name__)
        return StatefulSource(loader, Cut(0, dp_size, config.even_batches), dp_rank, shares=shares)
    if not loader.in_order and loader.num_workers:
        raise UsageError(
            "a DataLoader with in_order=False returns batches in the order in which workers finish them, so that its "
            "position cannot be saved",
            cure="Leave in_order at True.",
        )
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size or 0
        _refuse_split(splits and not size, "a dataset that yields whole batches")
        cut = Cut(split_total(size, dp_size) if splits else size, dp_size, config.even_batches, loader.drop_last)
        return IterableSource(
            loader, cut, dp_rank, shares=shares, numbers=ReadNumbers(coordinate), ignores_signals=ignores_signals
        )
    reading = Reading(loader, seeded=config.use_seedable_sampler or config.data_seed is not None)
    if ignores_signals and loader.num_workers:
        loader = clone(loader, {"worker_init_fn": WorkerInit(loader.worker_init_fn, ignores_signal=True)})
    size = reading.batch_size
    _refuse_split(splits and not size and loader.batch_sampler is None, "a loader with batch_size=None")
    cut = Cut(split_total(size, dp_size) if splits else size, dp_size, config.even_batches, reading.drop_last)
    numbers = ReadNumbers(coordinate)
    return MapSource(
        loader,
        reading,
        cut,
        dp_rank,
        split=splits and not size,
        shares=shares,
        numbers=numbers,
        agreement=agreement,
    )


def _refuse_split(refuse: bool, whose: str) -> None:
    if refuse:
        raise UsageError(
            f"split_batches cannot cut the batches of {whose}, which are made outside of the DataLoader",
            cure="Use split_batches=False: each rank then takes every n-th batch, n being the number of ranks.",
        )
