"""Reads data sets in a loader's workers, each sample with the random numbers of its place in the data."""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from drivetrain.data.comparison import FirstSamples
from drivetrain.data.orders import PrivateRandom, reseed
from drivetrain.data.plan import Cut, Position, StreamedOrder, derive_seed, plan_rounds, plan_samples
from drivetrain.data.source import num_rows, part_of
from drivetrain.distributed.rank_numbers import Held, host_digest, seed_everything
from drivetrain.launch.worker import SIGNALS


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


NO_BATCH = -1


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
            yield stream, NO_BATCH, [], None, None
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
            mine = part_of(batches, self.dp_rank)
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


def as_is(item: Any) -> Any:
    """Return an item, as where nothing is collated."""
    return item
