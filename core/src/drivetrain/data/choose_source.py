"""Chooses the source of a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.map_source import MapSource
from drivetrain.data.orders import Agree, Reading, ReadNumbers
from drivetrain.data.plan import Cut, split_total
from drivetrain.data.source import Source, clone
from drivetrain.data.stream_sources import IterableSource, StatefulSource
from drivetrain.data.worker_data import WorkerInit
from drivetrain.errors import UsageError
from drivetrain.kwargs import DataLoaderConfiguration


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
    """Return the source of a loader.

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
