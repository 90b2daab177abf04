"""Batches of an iterable dataset: every rank reads the stream and keeps its chunk of each global batch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.data.plan import Cut, StreamedOrder, derive_seed, plan_rounds, plan_samples, round_rows
from drivetrain.data.position import Identity
from drivetrain.data.source import Item, PrivateRandom, Start, clone, num_rows, reseed, seed_everything
from drivetrain.launch.worker import SIGNALS

# ---- Processes of a loader that go on when a run is told to end: it needs their batches until it has saved itself

@final
class OutlivingInit:
    """A ``worker_init_fn`` after which the process heeds a second signal only.

    Schedulers send SIGTERM to all processes of a job, and a terminal Ctrl-C, these among them. Whoever really means to
    end them asks twice: torch when it gives up on one, then Python when it ends.

    Args:
        function: the user's own.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:  # here, since torch sets handlers when the process has begun
            signal.signal(number, _heed_the_next)
        if self._function is not None:
            self._function(worker)


def outliving(loader: DataLoader[object]) -> DataLoader[object]:
    """The same loader, with processes that go on; itself where it has none."""
    if not loader.num_workers:
        return loader
    return clone(loader, {"worker_init_fn": OutlivingInit(loader.worker_init_fn)})


def _heed_the_next(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# ---- Batches of an iterable dataset: every rank reads the stream and keeps its chunk of each global batch

_NO_BATCH = -1


@final
class StreamShard(IterableDataset[Any]):
    """Reads the user's dataset, in this process or in a worker, and yields ``(stream, real, sizes, batch)``.

    ``real`` is the number of units that are not repeated, ``sizes`` are the rows of each rank's batch where the dataset
    yields whole batches.

    It cuts and collates by itself, since only where the stream is read is it known which samples are repeated. With
    workers each reads a stream of its own, as torch has it, the same on every rank.

    A whole global batch is held in memory: which rank gets what of the last one depends on where the stream ends.

    Args:
        dataset: the user's.
        cut: how units are shared out.
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
        # Persistent workers hold a copy of this object from the first epoch on; they see later ones by this memory.
        self._control = torch.zeros(4 + num_streams, dtype=torch.int64)

    def share(self) -> None:
        """Make :meth:`arm` reach the workers."""
        self._control.share_memory_()  # type: ignore[no-untyped-call]

    def arm(self, seed: int, epoch: int, turn: int, skip: tuple[int, ...], *, even_batches: bool) -> None:
        """Set where the next iteration begins: units to skip in each stream, and the stream that is next."""
        self._control.copy_(torch.tensor([seed, epoch, turn, even_batches, *skip]))

    def __iter__(self) -> Iterator[tuple[int, int, list[int | None], Any]]:
        info = get_worker_info()
        stream = 0 if info is None else info.id
        seed, epoch, turn, even, *skips = self._control.tolist()
        skip = skips[stream]
        if stream < turn:
            # Torch begins with worker 0; it is given something to pass over until the stream that was next comes.
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
    """Shows the user's ``worker_init_fn`` and dataset the ``get_worker_info().dataset`` that torch would show them."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        # WorkerInfo refuses assignment to protect users from themselves; this restores what they expect in it.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker)


@final
class IterableSource:
    """Batches of an ``IterableDataset``.

    Args:
        loader: the user's.
        cut: how units are shared out; ``batch_size`` 0 where the dataset yields whole batches.
        dp_rank: whose batches; ``None`` reads for all ranks.
        shares: see :class:`~drivetrain.data.position.Identity`.
        outlives: its processes go on when the run is told to end.
    """

    def __init__(
        self, loader: DataLoader[Any], cut: Cut, dp_rank: int | None, *, shares: int, outlives: bool = False
    ) -> None:
        self.cut, self._shares, self._dp_rank = cut, shares, dp_rank
        self.round_units = cut.units
        self.num_streams = max(loader.num_workers, 1)
        self._dataset = loader.dataset
        init: Any = loader.worker_init_fn
        collate: Any = loader.collate_fn
        self._shard = StreamShard(loader.dataset, cut, dp_rank, collate, self.num_streams, seed_workers=init is None)
        replaced: dict[str, Any] = {"dataset": self._shard, "batch_size": None, "batch_sampler": None}
        replaced |= {"drop_last": False, "collate_fn": _as_is, "_IterableDataset_len_called": None}
        if loader.num_workers:
            self._shard.share()
            replaced["worker_init_fn"] = _WorkerInit(OutlivingInit(init) if outlives else init)
        self._loader = clone(loader, replaced)

    def identity(self) -> Identity:
        dataset: Any = self._dataset
        length = len(dataset) if hasattr(dataset, "__len__") else None
        unit = "samples" if self.cut.batch_size else "batches"
        return Identity(unit, self.num_streams, length, self._shares)

    def open(self, start: Start) -> Generator[Item, None, None]:
        position, discard = start.position, start.discard
        cut = replace(self.cut, even_batches=start.even_batches)
        skips = (position.consumed,) if self.num_streams == 1 else position.streams or (0,) * self.num_streams
        self._shard.arm(start.seed, position.epoch, position.turn, skips, even_batches=start.even_batches)
        for stream, real, sizes, batch in self._loader:
            if real == _NO_BATCH:
                continue
            rows = cut.rows(real) if cut.batch_size else round_rows(sizes, real, cut.dp_size)
            absent = self._dp_rank is not None and not rows.loaded[self._dp_rank]
            yield Item(batch, rows, stream, hidden=discard > 0, absent=absent)
            discard -= 1

