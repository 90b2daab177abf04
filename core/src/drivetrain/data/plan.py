"""Plans which rank reads which samples, from the epoch's order, the position in it and the rank. Imports no torch.

The unit is a *sample* where Drivetrain makes the batches, and a whole *batch* where the user's batch sampler or dataset
makes them.

**Samples.** A global batch is the next ``dp_size * batch_size`` samples of the order. It is cut into ``dp_size``
consecutive chunks, so that the ranks' batches, one after the other, are the order. A last, incomplete one is cut as
evenly as possible: no two ranks differ by more than one sample, and nothing is repeated, since a repeated sample cannot
be taken out of the mean that a script computes as its loss. Each rank's loss is weighed by its number of samples
instead (:mod:`drivetrain.loop.window`). Where there are fewer samples than ranks, ``even_batches`` gives the
ranks without one a sample from the head of the order, with weight 0, so that all ranks take the same number of steps.

**Batches.** The ranks take batches in turn, a global batch is the next ``dp_size`` of them. With ``even_batches`` a
last, incomplete round is filled with batches from the head of the order.

Repeated samples are known without communication and excluded from metrics (:mod:`drivetrain.data.metrics`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, final

from drivetrain.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from drivetrain.data.drawing import OrderLog


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from several numbers or words; the same in every process and release."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_order(
    seed: int, epoch: int, size: int, *, num_samples: int | None = None, replacement: bool = False
) -> np.ndarray:
    """Shuffled indices below ``size`` for one epoch, int64, shape ``(num_samples,)``.

    Args:
        seed: of the loader.
        epoch: counts from 0.
        size: length of the dataset.
        num_samples: how many; ``None`` = ``size``. More than ``size`` repeats whole shuffles.
        replacement: draw each index independently.
    """
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(derive_seed("epoch", seed, epoch)))
    wanted = size if num_samples is None else num_samples
    if replacement:
        return generator.integers(size, size=wanted) if size else np.empty(0, dtype=np.int64)
    whole, rest = divmod(wanted, size) if size else (0, 0)
    turns = [generator.permutation(size) for _ in range(whole + (rest > 0))]
    if len(turns) == 1 and not rest:
        return turns[0]
    return np.concatenate(turns)[:wanted] if turns else np.empty(0, dtype=np.int64)


@final
class IndexedOrder:
    """One epoch's units (sample indices or whole batches) by position, from a ``range``, a list or a numpy array."""

    def __init__(self, units: Sequence[Any] | np.ndarray) -> None:
        self.units = units
        self.length: int | None = len(units)
        """Number of units, ``None`` when it is not known beforehand."""

    def take(self, start: int, stop: int) -> list[Any]:
        """Units ``start`` to ``stop - 1``; fewer at the end. ``start`` never goes back."""
        part = self.units[start:stop]
        # tolist() gives Python integers, which every dataset accepts.
        return part.tolist() if hasattr(part, "tolist") else list(part)

    def head(self, count: int) -> list[Any]:
        """The first units of the epoch, at most ``count``; never reads further than :meth:`take` has."""
        return self.take(0, count)


@final
class StreamedOrder:
    """Like :class:`IndexedOrder`, read forward from an iterator.

    Args:
        units: the epoch from its beginning.
        keep: how many of the first units are remembered for :meth:`head`.
        guard: context entered for each read, for the stream's own random state.
    """

    def __init__(self, units: Iterator[Any], keep: int, guard: AbstractContextManager[Any] | None = None) -> None:
        self._units, self._keep = units, keep
        self._guard = guard or nullcontext()
        self._position = 0
        self._first: list[Any] = []
        self.length: int | None = None

    def take(self, start: int, stop: int) -> list[Any]:
        assert start >= self._position, "a stream was asked to go back"
        while self._position < start and self._read(min(start - self._position, 1024)):
            pass
        return self._read(stop - self._position)

    def head(self, count: int) -> list[Any]:
        return self._first[:count]

    def _read(self, count: int) -> list[Any]:
        with self._guard:
            part = list(islice(self._units, count))
        if len(self._first) < self._keep:
            self._first += part[: self._keep - len(self._first)]
        self._position += len(part)
        return part


class Order(Protocol):
    """One epoch's units by position."""

    @property
    def length(self) -> int | None:
        """Number of units, ``None`` when it is not known for certain beforehand."""

    def take(self, start: int, stop: int) -> list[Any]:
        """Units ``start`` to ``stop - 1``; fewer at the end. ``start`` never goes back."""

    def head(self, count: int) -> list[Any]:
        """The first units of the epoch, at most ``count``; never reads further than :meth:`take` has."""


@dataclass(frozen=True)
class Rows:
    """Rows of one global batch, by data-parallel coordinate.

    Args:
        real: rows that count.
        loaded: rows that are loaded, repeated ones included.
        units: number of units by which it advances the position.
        whole: these are batches that the user's loader made.
        counted: the numbers are rows; otherwise a nominal 1 stands for a batch whose size is not known.
    """

    real: tuple[int, ...]
    loaded: tuple[int, ...]
    units: int
    whole: bool = False
    counted: bool = True

    @cached_property
    def padded(self) -> bool:
        """Some rows are repetitions."""
        return self.real != self.loaded

    def grown(self, size: int) -> Rows:
        """The same rows in batches padded to this size on every rank that has any."""
        return replace(self, loaded=tuple(size if number else 0 for number in self.loaded))

    @cached_property
    def total(self) -> int:
        """Rows that count, over all ranks."""
        return sum(self.real)

    def weight(self, dp_rank: int) -> float:
        """Return the factor of the mean over a rank's rows that makes the mean over ranks that over all rows."""
        return self.real[dp_rank] * len(self.real) / self.total

    @cached_property
    def even(self) -> bool:
        """Every rank has as many rows that count, so that the mean of their means is the mean over all rows."""
        return len(set(self.real)) <= 1

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Coordinates of the ranks that have no batch at all."""
        return tuple(rank for rank, rows in enumerate(self.loaded) if not rows)


@dataclass(frozen=True)
class Cut:
    """Rule that splits an order into batches.

    Args:
        batch_size: rows of one rank's full batch; ``0`` where the unit is a batch.
        dp_size: number of data-parallel coordinates.
        even_batches: give every rank the same number of batches.
        drop_last: leave an incomplete global batch of samples out.
    """

    batch_size: int
    dp_size: int = 1
    even_batches: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 0 or self.dp_size < 1:
            raise UsageError(
                f"cannot cut batches of {self.batch_size} for {self.dp_size} ranks",
                cure="Give at least 1 of each; a batch size of 0 stands for samples that are not batched.",
            )

    @property
    def units(self) -> int:
        """Units in a full global batch."""
        return (self.batch_size or 1) * self.dp_size

    @cached_property
    def full(self) -> Rows:
        """A full global batch of samples."""
        sizes = (self.batch_size,) * self.dp_size
        return Rows(sizes, sizes, self.units)

    def rows(self, samples: int) -> Rows:
        """The distribution of a global batch of this many samples."""
        if samples == self.units:
            return self.full
        base, extra = divmod(samples, self.dp_size)
        real = tuple(base + (rank < extra) for rank in range(self.dp_size))
        even = self.even_batches and samples > 0
        return Rows(real, tuple(max(rows, 1) for rows in real) if even else real, samples)

    def rounds(self, units: int, dp_rank: int) -> int:
        """Batches of this coordinate in an epoch of this many units."""
        full, rest = divmod(units, self.units)
        if not rest or (self.drop_last and self.batch_size):
            return full
        if self.batch_size:
            return full + (self.rows(rest).loaded[dp_rank] > 0)
        return full + (self.even_batches or dp_rank < rest)


def split_total(batch_size: int, dp_size: int) -> int:
    """Rows of one rank when the script's batch size is the global one (``split_batches``)."""
    if batch_size % dp_size:
        raise UsageError(
            f"split_batches cannot cut a batch of {batch_size} into {dp_size} equal parts",
            cure=f"Use a batch size that is a multiple of {dp_size}, or split_batches=False.",
        )
    return batch_size // dp_size


def chunk(block: list[Any], head: list[Any], rows: Rows, dp_rank: int) -> list[Any]:
    """One coordinate's part of a block of samples, repeated samples from ``head`` at its end."""
    start = sum(rows.real[:dp_rank])
    mine = block[start : start + rows.real[dp_rank]]
    missing = rows.loaded[dp_rank] - rows.real[dp_rank]
    if missing:
        before = sum(rows.loaded[:dp_rank]) - start
        mine = mine + [head[(before + index) % len(head)] for index in range(missing)]
    return mine


def plan_samples(order: Order, cut: Cut, start: int, dp_rank: int | None) -> Iterator[tuple[list[Any], Rows]]:
    """The rest of an epoch, from sample ``start`` on.

    Args:
        order: the epoch's samples.
        cut: how they are split.
        start: samples consumed, over all ranks.
        dp_rank: whose batches; ``None`` yields the global batches, all ranks' chunks one after the other.

    Yields:
        This coordinate's units and what the global batch holds; an empty list where it has no rows for this coordinate.
    """
    size, length, full = cut.units, order.length, cut.full
    lower, upper = (0, size) if dp_rank is None else (dp_rank * cut.batch_size, (dp_rank + 1) * cut.batch_size)
    while True:
        if length is not None and start + size <= length:
            yield order.take(start + lower, start + upper), full
            start += size
            continue
        block = order.take(start, start + size)
        if len(block) == size:
            yield block[lower:upper], full
            start += size
            continue
        if not block or cut.drop_last:
            return
        rows, head = cut.rows(len(block)), order.head(cut.dp_size)
        ranks = range(cut.dp_size) if dp_rank is None else (dp_rank,)
        yield [unit for rank in ranks for unit in chunk(block, head, rows, rank)], rows
        return


def plan_rounds(order: Order, cut: Cut, start: int) -> Iterator[tuple[list[Any], int]]:
    """The rest of an epoch in rounds of whole batches, from batch ``start`` on.

    Yields:
        A batch for each coordinate (fewer at the end without ``even_batches``), and how many of them are not repeated.
    """
    while True:
        batches = order.take(start, start + cut.dp_size)
        real = len(batches)
        if not real:
            return
        if real < cut.dp_size and cut.even_batches:
            head = order.head(cut.dp_size)
            batches = batches + [head[index % len(head)] for index in range(cut.dp_size - real)]
        yield batches, real
        if real < cut.dp_size:
            return
        start += real


def plan_split(
    order: Order, dp_size: int, start: int, dp_rank: int | None, *, even_batches: bool
) -> Iterator[tuple[list[Any], Rows]]:
    """The rest of an epoch whose batches are whole global batches, each cut among the ranks, from batch ``start`` on.

    A batch that does not divide is cut as evenly as possible; a rank without a sample gets one of the first ones.

    Raises:
        UsageError: a batch, other than the last, leaves a rank without samples while ``even_batches`` is off.
    """
    cut = Cut(1, dp_size, even_batches)
    starved = 0
    while batches := order.take(start, start + 1):
        if starved:
            raise UsageError(
                f"batch {start - 1} of the batch sampler has {starved} samples for {dp_size} ranks and is not the last",
                cure="Use even_batches=True, or batches of at least one sample for each rank.",
            )
        (batch,) = batches
        rows = replace(cut.rows(len(batch)), units=1)
        ranks = range(dp_size) if dp_rank is None else (dp_rank,)
        yield [unit for rank in ranks for unit in chunk(list(batch), list(batch), rows, rank)], rows
        starved = 0 if min(rows.loaded) else len(batch)
        start += 1


def round_rows(sizes: Sequence[int | None], real: int, dp_size: int) -> Rows:
    """The rows of a round of whole batches.

    Args:
        sizes: rows of each coordinate's batch, ``None`` where that is not known.
        real: how many of the batches are not repeated.
        dp_size: number of coordinates; those without a batch get 0 rows.
    """
    known = all(sizes)
    loaded = tuple(size if known and size else 1 for size in sizes) + (0,) * (dp_size - len(sizes))
    kept = tuple(size if rank < real else 0 for rank, size in enumerate(loaded))
    return Rows(kept, loaded, real, whole=True, counted=known)


@dataclass
class Position:
    """Position in the data. Mutable: a loader advances it with every batch, and a new object each time costs more.

    Args:
        seed: of an order that follows from the seed and the epoch, and of the random numbers that reads draw.
        generator: in states of format 2, the state of the user's generator before the first epoch.
        epoch: counts from 0.
        consumed: units (samples or batches) of the epoch that were yielded, over all ranks, without repetitions.
        finished: the epoch's last batch was yielded.
        streams: for a dataset read by several workers, units taken from each worker's stream; else empty.
        turn: the worker whose stream is next.
        mark: of a loader that has a state of its own: how many units were consumed when it was taken, and the state.
        numbers: what torch was seeded with when the epoch began; the random numbers of its reads follow from it.
        begun: a pass has begun here, and torch's loader has drawn what it draws then.
        order: what the order of the epoch follows from, as far as that has been drawn.
        legacy: every order follows from the seed, or from ``generator``, and the epoch, as in formats 1 and 2.
    """

    seed: int
    generator: int | str | None = None
    epoch: int = 0
    consumed: int = 0
    finished: bool = False
    streams: tuple[int, ...] = ()
    turn: int = 0
    mark: tuple[int, Any] | None = None
    numbers: int | None = None
    begun: bool = False
    order: OrderLog | None = None
    legacy: bool = False

    def at(self, epoch: int, consumed: int = 0) -> Position:
        """Another position, in an order that is not drawn yet."""
        return Position(self.seed, self.generator, epoch, consumed, legacy=self.legacy)


def length_of(data: Any) -> int | None:
    """Return the length of data, ``None`` if it has none."""
    try:
        return len(data) if hasattr(data, "__len__") else None
    except (TypeError, NotImplementedError):
        return None  # as torch's own iterable data sets do where they have no length
