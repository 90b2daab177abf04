"""The order of one epoch: a function of the seed and the epoch, the same on every rank. No torch.

An order is read by position. The two kinds differ in what they cost: :class:`IndexedOrder` has its length and any
stretch at once, :class:`StreamedOrder` reads forward and never knows its end before it is there (a sampler without
length, which may be infinite).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    import numpy as np


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


class Order(Protocol):
    """One epoch's units (sample indices or whole batches) by position."""

    @property
    def length(self) -> int | None:
        """Number of units, ``None`` when it is not known beforehand."""

    def take(self, start: int, stop: int) -> list[Any]:
        """Units ``start`` to ``stop - 1``; fewer at the end. ``start`` never goes back."""

    def head(self, count: int) -> list[Any]:
        """The first units of the epoch, at most ``count``; never reads further than :meth:`take` has."""


@final
class IndexedOrder:
    """An order that is a ``range``, a list or a numpy array."""

    def __init__(self, units: Sequence[Any] | np.ndarray) -> None:
        self._units = units

    @property
    def length(self) -> int:
        return len(self._units)

    def take(self, start: int, stop: int) -> list[Any]:
        part = self._units[start:stop]
        # tolist() gives Python's integers, which every dataset understands.
        return part.tolist() if hasattr(part, "tolist") else list(part)

    def head(self, count: int) -> list[Any]:
        return self.take(0, count)


@final
class StreamedOrder:
    """An order that is read forward from an iterator.

    Args:
        units: the epoch from its beginning.
        keep: how many of the first units are remembered for :meth:`head`.
        guard: entered around each stretch of reading, for random state that is the stream's own.
    """

    def __init__(self, units: Iterator[Any], keep: int, guard: AbstractContextManager[Any] | None = None) -> None:
        self._units, self._keep = units, keep
        self._guard = guard or nullcontext()
        self._position = 0
        self._first: list[Any] = []

    @property
    def length(self) -> None:
        return None

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
