"""Reads the batches of a prepared loader: from map-style and iterable datasets, stateful loaders, or the main process.

:class:`MapSource` and :class:`IterableSource` read torch's ``DataLoader``, :class:`StatefulSource` an object that has
its own state, and :class:`DispatchSource` distributes what the main process reads through one of these.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from drivetrain.backend import Backend
from drivetrain.data.plan import (
    Cut,
    Identity,
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
)
from drivetrain.distributed import trees
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.launch.worker import SIGNALS


@final
class PrivateRandom:
    """Python's, numpy's and torch's (CPU) global random state, swapped in on entry and out on exit.

    Code inside draws from a stream that depends on the seed alone, across any number of entries. Code outside is
    unaffected, with one exception: the second of a pair of normal numbers that numpy's legacy functions keep for the
    next call is drawn anew after an entry. (Numpy's generators are exchanged rather than copied, at a hundredth of the
    cost; an entry costs about ten microseconds.)
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
        generator: the user's generator that decided the order, if there is one.
    """

    batch_size: int
    drop_last: bool
    open: OpenOrder
    length: Callable[[], int | None]
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
    return Reading(size, drop_last, opener, length, _generator_of(loader, sampler))


def _generator_of(loader: DataLoader[Any], sampler: Any) -> torch.Generator | None:
    mine = [each for each in generators(sampler) if isinstance(each, torch.Generator)]
    return mine[0] if mine else loader.generator


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


def _read_sampler(sampler: Any) -> tuple[OpenOrder, Callable[[], int | None]]:
    if _is_plain(sampler, SequentialSampler):
        source = sampler.data_source
        return lambda _seed, _epoch, _keep: IndexedOrder(range(len(source))), lambda: len(source)
    if _is_plain(sampler, RandomSampler):
        return _random(sampler), lambda: sampler.num_samples
    if _is_plain(sampler, DistributedSampler):
        return _distributed(sampler)

    def open_order(seed: int, epoch: int, keep: int) -> Order:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        own = derive_seed("sampler", seed, epoch)
        reseed(sampler, own)
        guard = PrivateRandom(own)
        with guard:
            units = iter(sampler)
            if _length(sampler) is not None:
                return IndexedOrder(list(units))
        return StreamedOrder(units, keep, guard)

    return open_order, lambda: _length(sampler)


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


class Item(NamedTuple):
    """One batch of a source.

    Args:
        batch: this rank's rows; in a source read for all ranks the global batch, or the list of every rank's batch.
        rows: what the global batch holds.
        stream: the worker it came from, where each worker reads its own stream.
        mark: the loader's own state after this batch, for loaders that keep one.
        hidden: it counts as consumed but is not yielded.
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
        position: what has been yielded, or is to be skipped.
        even_batches: as in :class:`~drivetrain.data.plan.Cut`.
        discard: skip this many further global batches (where their streams are known only by reading).
        mark: units consumed when the loader's own state was taken, and that state, for loaders that keep one.
    """

    seed: int
    position: Position
    even_batches: bool
    discard: int = 0
    mark: tuple[int, Any] | None = None


class Source(ABC):
    """Reads the batches of a prepared loader.

    Args:
        cut: how units are split; ``batch_size`` 0 where the unit is a whole batch.
        dp_rank: whose batches; ``None`` reads for all ranks.
        shares: see :class:`~drivetrain.data.plan.Identity`.

    Attributes:
        round_units: units of a full global batch.
        num_streams: number of streams, one per worker; 1 without workers.
    """

    num_streams = 1

    def __init__(self, cut: Cut, dp_rank: int | None, shares: int) -> None:
        self.cut, self._dp_rank, self._shares = cut, dp_rank, shares
        self.round_units = cut.units

    def identity(self) -> Identity:
        """The identity that its positions belong to."""
        return Identity("samples" if self.cut.batch_size else "batches", self.num_streams, self.length(), self._shares)

    @abstractmethod
    def length(self) -> int | None:
        """Units in an epoch, ``None`` when they are not known beforehand."""

    @abstractmethod
    def open(self, start: Start) -> Generator[Item, None, None]:
        """The rest of an epoch."""


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
class PlannedSampler:
    """Replaces the user's sampler: gives the planned units to the ``DataLoader`` and keeps their rows.

    The rows of a global batch without units for this rank are kept, and the ``DataLoader`` does not see that batch.
    """

    def __init__(self) -> None:
        self._plan: Iterator[tuple[Any, Rows]] = iter(())
        self._planned: deque[Rows] = deque()

    def set_plan(self, plan: Iterator[tuple[Any, Rows]]) -> deque[Rows]:
        """Set what the next iteration yields; returns the rows of its batches, in the same order, as they are read."""
        self._plan, self._planned = plan, deque()
        return self._planned

    def __iter__(self) -> Iterator[Any]:
        plan, keep = self._plan, self._planned.append
        for units, rows in plan:
            keep(rows)
            if units is not None:
                yield units


@final
class MapSource(Source):
    """Batches of a map-style dataset: workers fetch them directly, following the plan.

    Args:
        loader: the user's.
        reading: its order.
        cut, dp_rank, shares: see :class:`Source`.
        split: each whole batch is a global one, cut among the ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], reading: Reading, cut: Cut, dp_rank: int | None, *, split: bool, shares: int
    ) -> None:
        super().__init__(cut, dp_rank, shares)
        self._reading, self._split = reading, split
        if split:
            self.round_units = 1
        self._in_rounds = not cut.batch_size and not split
        self._sampler = PlannedSampler()
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._loader = clone(loader, {name: self._sampler})

    def length(self) -> int | None:
        return self._reading.length()

    def open(self, start: Start) -> Generator[Item, None, None]:
        dataset: Any = self._loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(start.position.epoch)
        cut = replace(self.cut, even_batches=start.even_batches)
        order = self._reading.open(start.seed, start.position.epoch, cut.dp_size)
        planned = self._sampler.set_plan(self._plan(order, cut, start.position.consumed))
        batches = iter(self._loader)
        for first in batches:
            batch, rows = first, planned.popleft()
            if self._in_rounds and self._dp_rank is None:
                # The other ranks' batches of this round follow; their rows are the same.
                others = sum(size > 0 for size in rows.loaded) - 1
                batch = [first, *(next(batches) for _ in range(others))]
                for _ in range(others):
                    planned.popleft()
            yield Item(batch, rows)
        for rows in planned:
            yield Item(None, rows, absent=True)

    def _plan(self, order: Order, cut: Cut, begin: int) -> Iterator[tuple[Any, Rows]]:
        if cut.batch_size:
            yield from _or_none(plan_samples(order, cut, begin, self._dp_rank))
        elif self._split:
            yield from _or_none(plan_split(order, cut.dp_size, begin, self._dp_rank, even_batches=cut.even_batches))
        else:
            for batches, real in plan_rounds(order, cut, begin):
                rows = round_rows([_num_indices(batch) for batch in batches], real, cut.dp_size)
                if self._dp_rank is None:
                    yield from ((batch, rows) for batch in batches)
                else:
                    yield (batches[self._dp_rank] if self._dp_rank < len(batches) else None), rows


def _or_none(plan: Iterator[tuple[list[Any], Rows]]) -> Iterator[tuple[list[Any] | None, Rows]]:
    return ((units or None, rows) for units, rows in plan)


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
        # Skipped batches are not kept, except the first, which may be needed to fill the last round.
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


@final
class _IgnoreFirstSignal:
    """A ``worker_init_fn`` that makes the process ignore the first SIGTERM or SIGINT.

    Schedulers send SIGTERM to all processes of a job, and a terminal sends SIGINT, loader workers included. Those that
    must really end get a second signal: from torch when it gives up on one, then from Python when it exits.

    Args:
        function: the user's own.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:  # here, since torch sets handlers when the process has started
            signal.signal(number, _heed_next_signal)
        if self._function is not None:
            self._function(worker)


def ignore_first_signal(loader: DataLoader[object]) -> DataLoader[object]:
    """The same loader, whose workers ignore the first signal; unchanged without workers."""
    if not loader.num_workers:
        return loader
    return clone(loader, {"worker_init_fn": _IgnoreFirstSignal(loader.worker_init_fn)})


def _heed_next_signal(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


_NO_BATCH = -1


@final
class StreamShard(IterableDataset[Any]):
    """Reads the user's dataset, in this process or in a worker, and yields ``(stream, real, sizes, batch)``.

    ``real`` is the number of units that are not repeated, ``sizes`` are the rows of each rank's batch where the dataset
    yields whole batches.

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
        # Persistent workers hold a copy of this object from the first epoch; this memory tells them of later ones.
        self._control = torch.zeros(4 + num_streams, dtype=torch.int64)

    def share(self) -> None:
        """Make :meth:`begin_at` reach the workers."""
        self._control.share_memory_()  # type: ignore[no-untyped-call]

    def begin_at(self, seed: int, epoch: int, turn: int, skip: tuple[int, ...], *, even_batches: bool) -> None:
        """Set where the next iteration begins: units to skip in each stream, and the stream that is next."""
        self._control.copy_(torch.tensor([seed, epoch, turn, even_batches, *skip]))

    def __iter__(self) -> Iterator[tuple[int, int, list[int | None], Any]]:
        info = get_worker_info()
        stream = 0 if info is None else info.id
        seed, epoch, turn, even, *skips = self._control.tolist()
        skip = skips[stream]
        if stream < turn:
            # torch begins with worker 0; it gets batches to skip until the stream that was next.
            yield stream, _NO_BATCH, [], None
        own = derive_seed("stream", seed, epoch, stream)
        guard: AbstractContextManager[None] | None = None
        if info is None:
            guard = PrivateRandom(own)
        elif self._seed_workers:
            seed_everything(own)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        reseed(self.dataset, own)
        cut = replace(self.cut, even_batches=bool(even))
        order = StreamedOrder(_deferred(self.dataset), cut.dp_size, guard)
        if cut.batch_size:
            for mine, rows in plan_samples(order, cut, skip, self.dp_rank):
                yield stream, rows.units, [], self._collate(mine) if mine else None
            return
        for batches, real in plan_rounds(order, cut, skip):
            sizes = [num_rows(batch) for batch in batches]
            if self.dp_rank is None:
                yield stream, real, sizes, [self._collate(batch) for batch in batches]
            else:
                yield stream, real, sizes, self._collate(batches[self.dp_rank]) if self.dp_rank < len(batches) else None


def _deferred(dataset: Any) -> Iterator[Any]:
    # The user's __iter__ may draw its shuffle at once; here it runs with the first read, inside the guard.
    yield from dataset


def _as_is(item: Any) -> Any:
    return item


@final
class _WorkerInit:
    """Gives the user's ``worker_init_fn`` and dataset the same ``get_worker_info().dataset`` as torch."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        # WorkerInfo refuses assignment to protect users; this restores what they expect in it.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker)


@final
class IterableSource(Source):
    """Batches of an ``IterableDataset``.

    Args:
        loader: the user's.
        cut, dp_rank, shares: see :class:`Source`.
        ignores_signals: its workers ignore the first signal.
    """

    def __init__(
        self, loader: DataLoader[Any], cut: Cut, dp_rank: int | None, *, shares: int, ignores_signals: bool = False
    ) -> None:
        super().__init__(cut, dp_rank, shares)
        self.num_streams = max(loader.num_workers, 1)
        self._dataset = loader.dataset
        init: Any = loader.worker_init_fn
        collate: Any = loader.collate_fn
        self._shard = StreamShard(loader.dataset, cut, dp_rank, collate, self.num_streams, seed_workers=init is None)
        replaced: dict[str, Any] = {"dataset": self._shard, "batch_size": None, "batch_sampler": None}
        replaced |= {"drop_last": False, "collate_fn": _as_is, "_IterableDataset_len_called": None}
        if loader.num_workers:
            self._shard.share()
            replaced["worker_init_fn"] = _WorkerInit(_IgnoreFirstSignal(init) if ignores_signals else init)
        self._loader = clone(loader, replaced)

    def length(self) -> int | None:
        return _length(self._dataset)

    def open(self, start: Start) -> Generator[Item, None, None]:
        position, discard = start.position, start.discard
        cut = replace(self.cut, even_batches=start.even_batches)
        skips = (position.consumed,) if self.num_streams == 1 else position.streams or (0,) * self.num_streams
        self._shard.begin_at(start.seed, position.epoch, position.turn, skips, even_batches=start.even_batches)
        for stream, real, sizes, batch in self._loader:
            if real == _NO_BATCH:
                continue
            rows = cut.rows(real) if cut.batch_size else round_rows(sizes, real, cut.dp_size)
            absent = self._dp_rank is not None and not rows.loaded[self._dp_rank]
            yield Item(batch, rows, stream, hidden=discard > 0, absent=absent)
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
        super().__init__(inner.cut, None, shares=0)
        self._inner, self._backend, self._slice = inner, backend, slice_fn
        self.round_units, self.num_streams = inner.round_units, inner.num_streams

    def length(self) -> int | None:
        return self._inner.length()

    def open(self, start: Start) -> Generator[Item, None, None]:
        topology, backend = self._backend.topology, self._backend
        reader = self._read(start) if topology.rank == 0 else None
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
            if item is not None and item.rows.loaded[topology.dp_rank]:
                yield item._replace(batch=self._part(item, topology.dp_rank, topology.dp_size))
            elif item is not None:
                yield item._replace(batch=None, absent=True)

    def _read(self, start: Start) -> Iterator[tuple[Item | None, bool]]:
        """``(item, nothing follows)`` until the end."""
        items = self._inner.open(start)
        try:
            following = next(items, None)
            if following is None:
                yield None, True
            while following is not None:
                item, following = following, next(items, None)
                yield item, following is None
        except Exception as error:
            # The others wait for a batch; tell them why there is none before this rank raises.
            self._backend.broadcast_object((f"{type(error).__name__}: {error}", True))
            raise

    def _part(self, item: Item, dp_rank: int, dp_size: int) -> Any:
        if item.rows.whole:
            return item.batch[dp_rank] if item.rows.loaded[dp_rank] else None
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
