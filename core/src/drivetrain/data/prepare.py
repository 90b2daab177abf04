"""Prepares a data loader: decides how its samples are distributed over ranks and which seed orders them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.loader import Cursor, LoadingContext, PreparedDataLoader, is_sharded
from drivetrain.data.metrics import set_loaders
from drivetrain.data.plan import Cut, derive_seed, split_total
from drivetrain.data.source import (
    DispatchSource,
    IterableSource,
    MapSource,
    SliceFunction,
    Source,
    StatefulSource,
    generators,
    ignore_first_signal,
    read_map_loader,
)
from drivetrain.distributed.trees import attribute
from drivetrain.errors import UsageError


def is_loader(value: Any) -> bool:
    """Whether :func:`prepare_data_loader` takes this: a torch ``DataLoader``, or an iterable that has its own state."""
    if isinstance(value, DataLoader):
        return True
    if isinstance(value, (type, torch.nn.Module)):
        return False
    return all(callable(attribute(value, name)) for name in ("__iter__", "state_dict", "load_state_dict"))


def prepare_data_loader(
    loader: Any,
    context: LoadingContext,
    *,
    put_on_device: bool | None = None,
    slice_fn_for_dispatch: SliceFunction | None = None,
) -> PreparedDataLoader:
    """Distribute a loader's samples over the data-parallel ranks. A prepared loader is returned unchanged.

    Collective over all ranks if the loader has a random generator of the user's (its seed is taken from rank 0), else
    local. Every rank prepares its loaders in the same order.

    Args:
        loader: a ``DataLoader`` with any dataset, sampler, collate function and workers; or any object with
            ``__iter__``, ``state_dict`` and ``load_state_dict``, whose batches the ranks take in turn.
        context: the run.
        put_on_device: move batches to the device; ``None`` = as the context says.
        slice_fn_for_dispatch: ``fn(batch, slice, process_index=, num_processes=)``, one rank's part of a batch that the
            main process has read.

    Raises:
        UsageError: this is no loader, or the settings do not fit it.
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not is_loader(loader):
        raise UsageError(
            f"{type(loader).__name__} is no data loader",
            cure="Pass a torch DataLoader, or an object with __iter__, state_dict and load_state_dict.",
        )
    number = context.active.register()
    set_loaders(context.backend, context.active)
    data = loader.dataset if isinstance(loader, DataLoader) else loader
    shares = context.dp_size if is_sharded(data) or is_sharded(loader) else 0
    dp_size = 1 if shares else context.dp_size
    # Also for ranks that compute one batch together: each would read it separately.
    dispatched = bool(context.config.dispatch_batches) and not shares and context.backend.topology.world_size > 1
    if slice_fn_for_dispatch is not None and not context.config.dispatch_batches:
        raise UsageError(
            "slice_fn_for_dispatch is used with dispatch only",
            cure="Set DataLoaderConfiguration(dispatch_batches=True), or leave it out.",
        )
    dp_rank = None if dispatched else 0 if shares else context.dp_rank
    source, generator = _source(loader, context, dp_size, dp_rank, shares)
    if dispatched:
        if slice_fn_for_dispatch is not None and not source.cut.batch_size and source.round_units > 1:
            raise UsageError(
                "slice_fn_for_dispatch has nothing to cut: this loader's batches go to the ranks as they are",
                cure="Leave it out, or set split_batches=True with your batch sampler.",
            )
        source = DispatchSource(source, context.backend, slice_fn_for_dispatch)
    return PreparedDataLoader(
        loader,
        source,
        context,
        Cursor(_seed(context, generator, number), even_batches=context.config.even_batches),
        put_on_device=context.put_on_device if put_on_device is None else put_on_device,
        number=number,
    )


def _source(
    loader: Any, context: LoadingContext, dp_size: int, dp_rank: int | None, shares: int
) -> tuple[Source, torch.Generator | None]:
    config = context.config
    if not isinstance(loader, DataLoader):
        _refuse_split(config.split_batches and dp_size > 1, type(loader).__name__)
        return StatefulSource(loader, Cut(0, dp_size, config.even_batches), dp_rank, shares=shares), None
    if not loader.in_order and loader.num_workers:
        raise UsageError(
            "in_order=False lets workers return batches in any order, so nobody knows which samples were shown",
            cure="Leave in_order at True.",
        )
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size or 0
        if config.split_batches and dp_size > 1:
            _refuse_split(not size, "a dataset that yields whole batches")
            size = split_total(size, dp_size)
        cut = Cut(size, dp_size, config.even_batches, loader.drop_last)
        held = [each for each in generators(loader.dataset) if isinstance(each, torch.Generator)]
        ignores_signals = context.interruption is not None
        source = IterableSource(loader, cut, dp_rank, shares=shares, ignores_signals=ignores_signals)
        return source, held[0] if held else loader.generator
    reading = read_map_loader(loader)
    if context.interruption is not None:
        loader = ignore_first_signal(loader)
    size, split = reading.batch_size, False
    if config.split_batches and dp_size > 1:
        split = not size
        _refuse_split(split and loader.batch_sampler is None, "a loader with batch_size=None")
        size = split_total(size, dp_size)
    cut = Cut(size, dp_size, config.even_batches, reading.drop_last)
    return MapSource(loader, reading, cut, dp_rank, split=split, shares=shares), reading.generator


def _refuse_split(refuse: bool, whose: str) -> None:
    if refuse:
        raise UsageError(
            f"split_batches cannot cut the batches of {whose}: only it knows what a row is",
            cure="Use split_batches=False; the ranks then take its batches in turn.",
        )


def _seed(context: LoadingContext, generator: torch.Generator | None, number: int) -> int:
    """Seed from the user's generator, else from ``data_seed``, else from the run's seed and the loader's number."""
    if generator is not None:
        return derive_seed("generator", context.backend.broadcast_object(generator.initial_seed()))
    if context.config.data_seed is not None:
        return derive_seed("data", context.config.data_seed)
    return derive_seed("loader", context.base_seed, number)
