"""Reads the orders that a loader's samplers draw, and keeps what they draw apart from the script's random numbers."""

from __future__ import annotations

import base64
import copy
import ctypes
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from drivetrain.data.comparison import PassComparison
from drivetrain.data.drawing import DrawnOrder, ScriptUnits, TorchUnits, generators, set_state_of, state_of
from drivetrain.data.plan import IndexedOrder, Order, Position, StreamedOrder, derive_seed, length_of, random_order
from drivetrain.distributed.rank_numbers import numbers_coordinate, seed_generator
from drivetrain.distributed.rng import draws_alike


@final
class PrivateRandom:
    """Python's, numpy's and torch's (CPU) global random state, swapped in on entry and out on exit.

    Code inside draws from a stream that depends on the seed alone, across any number of entries. Code outside is
    unaffected, with one exception: the second of a pair of normal numbers that numpy's legacy functions keep for the
    next call is drawn anew after an entry. (Numpy's generators are exchanged, and Python's state is copied as bytes,
    since an entry is paid for at each batch: getting and setting it would cost ten times the rest.)
    """

    def __init__(self, seed: int) -> None:
        bits = np.random.RandomState(seed % 2**32)._bit_generator  # noqa: SLF001 (what get_bit_generator returns)
        self._python = _PythonNumbers(random.Random(seed))
        self._other = torch.Generator().manual_seed(seed).get_state(), bits

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        numpy: Any = np.random
        self._python.swap()
        before = torch.default_generator.get_state(), numpy.get_bit_generator()
        torch.default_generator.set_state(self._other[0])
        numpy.set_bit_generator(self._other[1])
        self._other = before


@final
class _PythonNumbers:
    """A generator of Python's, whose state can change places with the global one's.

    Args:
        generator: of the state that the first swap brings in.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generators: tuple[random.Random, random.Random] = (random.getstate.__self__, generator)  # type: ignore[attr-defined]
        self._memory = tuple(map(_words, self._generators)) if _in_memory() else None

    def swap(self) -> None:
        """Exchange the two states."""
        one, other = self._generators
        if self._memory is None:
            state = one.getstate()
            one.setstate(other.getstate())
            other.setstate(state)
            return
        its, others = self._memory
        its.raw, others.raw = others.raw, its.raw
        # The second of a pair of normal numbers, kept for the next call.
        one.gauss_next, other.gauss_next = other.gauss_next, one.gauss_next  # type: ignore[attr-defined]


def _words(generator: random.Random) -> Any:
    """The place among the 624 words of the state, and these words, where CPython keeps them."""
    return (ctypes.c_char * (4 * 625)).from_address(id(generator) + object.__basicsize__)


@cache
def _in_memory() -> bool:
    """Whether this Python keeps a generator's state where :func:`_words` says."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * 625:
        return False
    generator, copied = random.Random(5), random.Random(6)
    generator.random()
    at, *words = memoryview(_words(generator)).cast("B").cast("I")
    if (*words, at) != generator.getstate()[1]:
        return False
    _words(copied).raw = _words(generator).raw
    return copied.getstate() == generator.getstate()


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
        return length_of(self._sampler)

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


def num_indices(unit: Any) -> int | None:
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
            if length_of(sampler) is not None:
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
