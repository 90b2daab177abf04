"""What a map-style ``DataLoader`` reads, in which order: its samplers, translated to a function of seed and epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from drivetrain.data.order import IndexedOrder, Order, StreamedOrder, derive_seed, random_order
from drivetrain.runtime.loading.randomness import PrivateRandom, generators, reseed

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
