"""Where a prepared loader's batches come from: one small interface, and the source for map-style datasets."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain.data.plan import (
    Cut,
    IndexedOrder,
    Order,
    Rows,
    StreamedOrder,
    derive_seed,
    plan_rounds,
    plan_samples,
    plan_split,
    random_order,
    round_rows,
)
from drivetrain.data.position import Identity, Position
from drivetrain.distributed import trees
from drivetrain.errors import UsageError

# ---- Random state of its own for code that decides the order of samples, so that every rank decides the same

@final
class PrivateRandom:
    """Python's, numpy's and torch's (CPU) global random state, swapped in on entry and out on exit.

    What runs inside sees a stream that depends on the seed alone, across any number of entries. What runs outside does
    not notice it, save for one thing: the second of a pair of normal numbers that numpy's legacy functions keep for
    the next call is drawn anew after an entry. (Numpy's generators are exchanged rather than copied, at a hundredth of
    the cost; an entry costs about ten microseconds.)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        outside = _capture()
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        self._inside = _capture()
        _restore(outside)
        self._outside: tuple[Any, ...] = ()
        self._bits: Any = None
        self._outside_bits: Any = None

    def __enter__(self) -> None:
        self._outside = _capture()
        _restore(self._inside)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if self._bits is None:
                self._bits = _legacy_generator(numpy, self._seed)
            self._outside_bits = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(self._bits)

    def __exit__(self, *_: object) -> None:
        self._inside = _capture()
        _restore(self._outside)
        if self._outside_bits is not None:
            sys.modules["numpy"].random.set_bit_generator(self._outside_bits)
            self._outside_bits = None


def _legacy_generator(numpy: Any, seed: int) -> Any:
    """A bit generator that gives the numbers that ``numpy.random.seed(seed)`` would."""
    _, key, position, *_ = numpy.random.RandomState(seed % 2**32).get_state()
    bits = numpy.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
    return bits


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's (CPU) global random state; numpy only where it is loaded."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _capture() -> tuple[Any, ...]:
    return random.getstate(), torch.default_generator.get_state()


def _restore(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.default_generator.set_state(state[1])


def generators(sampler: Any) -> Iterator[Any]:
    """Random generators that a sampler holds, and those of samplers inside it, in the order of its attributes."""
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if _is_generator(value):
            yield value
        elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            yield from generators(value)


def reseed(sampler: Any, seed: int) -> None:
    """Give every generator that a sampler holds a seed of its own."""
    for index, generator in enumerate(generators(sampler)):
        own = derive_seed("generator", seed, index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own % 2**32)


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


# ---- What a map-style ``DataLoader`` reads, in which order: its samplers, translated to a function of seed and epoch

OpenOrder = Callable[[int, int, int], Order]
"""``open(seed, epoch, keep)``: an epoch's order; ``keep`` is how many of its first units may be asked for again."""


@dataclass(frozen=True)
class Reading:
    """How a map-style loader is read.

    Args:
        batch_size: rows of the script's batch, 0 where the unit is a whole batch.
        drop_last: leave out an incomplete batch.
        open: the order of an epoch.
        length: units in an epoch, ``None`` when they are not known beforehand.
        rows: rows in one unit where the unit is a batch, ``None`` where the unit does not say.
        generator: the user's generator that decided the order, if there is one.
    """

    batch_size: int
    drop_last: bool
    open: OpenOrder
    length: Callable[[], int | None]
    rows: Callable[[Any], int | None]
    generator: torch.Generator | None


def read_map_loader(loader: DataLoader[Any]) -> Reading:
    """Translate a loader's samplers.

    Torch's own random and sequential samplers are replaced by orders that cost nothing to resume. Any other sampler is
    iterated, the same way on every rank: under random state that depends on the seed and the epoch, its own generators
    seeded likewise, after a call of its ``set_epoch`` if it has one.
    """
    batch_sampler: Any = loader.batch_sampler
    if _is_plain(batch_sampler, BatchSampler):
        opener, length = _read_sampler(batch_sampler.sampler)
        sampler, size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    else:
        sampler, size, drop_last = batch_sampler if batch_sampler is not None else loader.sampler, 0, False
        opener, length = _read_sampler(sampler)
    return Reading(size, drop_last, opener, length, _unit_rows, _generator_of(loader, sampler))


def _generator_of(loader: DataLoader[Any], sampler: Any) -> torch.Generator | None:
    mine = [each for each in generators(sampler) if isinstance(each, torch.Generator)]
    return mine[0] if mine else loader.generator


def _unit_rows(unit: Any) -> int | None:
    # The indices of a batch; one index may stand for a batch that the dataset makes.
    is_batch = getattr(unit, "ndim", 0) == 1 or (isinstance(unit, Sequence) and not isinstance(unit, (str, bytes)))
    return len(unit) if is_batch else None


def _is_plain(sampler: Any, kind: type) -> bool:
    """Of this very class, or its twin in torchdata, whose stateful loader brings samplers of its own.

    A subclass may do anything, so it is iterated instead.
    """
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


def _read_sampler(sampler: Any) -> tuple[OpenOrder, Callable[[], int | None]]:
    if _is_plain(sampler, SequentialSampler):
        source = sampler.data_source
        return lambda _seed, _epoch, _keep: IndexedOrder(range(len(source))), lambda: len(source)
    if _is_plain(sampler, RandomSampler):
        return _random(sampler), lambda: sampler.num_samples
    if _is_plain(sampler, DistributedSampler):
        return _distributed(sampler)

    def length() -> int | None:
        return len(sampler) if hasattr(sampler, "__len__") else None

    def open_order(seed: int, epoch: int, keep: int) -> Order:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        own = derive_seed("sampler", seed, epoch)
        reseed(sampler, own)
        guard = PrivateRandom(own)
        with guard:
            units = iter(sampler)
            if length() is not None:
                return IndexedOrder(list(units))
        return StreamedOrder(units, keep, guard)

    return open_order, length


def _random(sampler: RandomSampler) -> OpenOrder:
    return lambda seed, epoch, _keep: IndexedOrder(
        random_order(
            seed,
            epoch,
            len(sampler.data_source),
            num_samples=sampler.num_samples,
            replacement=sampler.replacement,
        )
    )


def _distributed(sampler: DistributedSampler[Any]) -> tuple[OpenOrder, Callable[[], int | None]]:
    warnings.warn(
        "this DataLoader has a DistributedSampler, which would share its samples out a second time; it is replaced by "
        f"the whole dataset, {'shuffled' if sampler.shuffle else 'in order'}. Leave it out: DataLoader(dataset, "
        f"shuffle={sampler.shuffle}).",
        UserWarning,
        stacklevel=6,
    )
    dataset: Any = sampler.dataset

    def open_order(seed: int, epoch: int, _keep: int) -> Order:
        size = len(dataset)
        if not sampler.shuffle:
            return IndexedOrder(range(size))
        return IndexedOrder(random_order(derive_seed(seed, sampler.seed), epoch, size))

    return open_order, lambda: len(dataset)


# ---- Where a prepared loader's batches come from: one small interface, and the source for map-style datasets

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
    """What :class:`~drivetrain.data.loader.PreparedDataLoader` iterates."""

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


# ---- Loaders that are not torch's but carry their own state: every rank runs one and keeps each of its batches in tu

@final
class ForeignSource:
    """Batches of an object with ``__iter__``, ``state_dict`` and ``load_state_dict``.

    Its state is taken after every global batch, before the next is read, and saved with the position. A loader that is
    marked as already sharded has a state on each rank.

    Args:
        loader: the user's.
        cut: how batches are shared out; ``batch_size`` is 0.
        dp_rank: whose batches; ``None`` reads for all ranks.
        shares: see :class:`~drivetrain.data.position.Identity`.
    """

    num_streams = 1

    def __init__(self, loader: Any, cut: Cut, dp_rank: int | None, *, shares: int) -> None:
        self.cut, self._loader, self._dp_rank, self._shares = cut, loader, dp_rank, shares
        self.round_units = cut.units

    def identity(self) -> Identity:
        length = len(self._loader) if hasattr(self._loader, "__len__") else None
        return Identity("batches", length=length, shares=self._shares)

    def open(self, start: Start) -> Generator[Item, None, None]:
        loader, wanted, read = self._loader, start.position.consumed, 0
        if callable(getattr(loader, "set_epoch", None)):
            loader.set_epoch(start.position.epoch)
        if start.mark is not None:
            read, state = start.mark
            if read > wanted:
                raise UsageError(
                    f"{type(loader).__name__} was restored after batch {read} and cannot go back to batch {wanted}",
                    cure="Leave skip_first_batches out: load_state restored the position.",
                )
            loader.load_state_dict(state)
        cut = replace(self.cut, even_batches=start.even_batches)
        # Batches are passed over without being kept, except the first, which may be needed to fill the last round.
        order = StreamedOrder(iter(loader), cut.dp_size)
        for batch_list, real in plan_rounds(order, cut, wanted - read):
            rows = round_rows([num_rows(batch) for batch in batch_list], real, cut.dp_size)
            mark = loader.state_dict()
            if self._dp_rank is None:
                yield Item(batch_list, rows, mark=mark)
            elif self._dp_rank < len(batch_list):
                yield Item(batch_list[self._dp_rank], rows, mark=mark)
            else:
                yield Item(None, rows, absent=True)

