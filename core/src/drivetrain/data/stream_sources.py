"""Reads the batches of an iterable data set, and those of a loader that has its own state."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from drivetrain.data.comparison import Content
from drivetrain.data.drawing import generators
from drivetrain.data.orders import ReadNumbers
from drivetrain.data.plan import Cut, Position, StreamedOrder, length_of, plan_rounds, round_rows
from drivetrain.data.source import Item, Source, clone, num_rows, part_of
from drivetrain.data.worker_data import NO_BATCH, StreamShard, WorkerInit, as_is
from drivetrain.errors import UsageError


@final
class IterableSource(Source):
    """Batches of an ``IterableDataset``.

    Args:
        loader: the user's.
        cut, dp_rank, shares: see :class:`Source`.
        numbers: what its ``collate_fn`` draws.
        ignores_signals: its workers ignore the first signal.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        cut: Cut,
        dp_rank: int | None,
        *,
        shares: int,
        numbers: ReadNumbers,
        ignores_signals: bool = False,
    ) -> None:
        super().__init__(cut, dp_rank, shares)
        self._numbers = numbers
        self.num_streams = max(loader.num_workers, 1)
        self._dataset = loader.dataset
        held = [each for each in generators(loader.dataset) if isinstance(each, torch.Generator)]
        self.generator = held[0] if held else loader.generator
        init: Any = loader.worker_init_fn
        collate: Any = loader.collate_fn
        self._shard = StreamShard(loader.dataset, cut, dp_rank, collate, self.num_streams, seed_workers=init is None)
        replaced: dict[str, Any] = {"dataset": self._shard, "batch_size": None, "batch_sampler": None}
        replaced |= {"drop_last": False, "collate_fn": as_is, "_IterableDataset_len_called": None}
        if loader.num_workers:
            self._shard.share()
            replaced["worker_init_fn"] = WorkerInit(init, ignores_signal=ignores_signals)
        self._loader = clone(loader, replaced)

    def length(self) -> int | None:
        return length_of(self._dataset)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        cut = self.cut
        skips = (position.consumed,) if self.num_streams == 1 else position.streams or (0,) * self.num_streams
        numbers = self._numbers.seed(position) if self._numbers.apply else None
        self._shard.begin_at(position, skips, even_batches=cut.even_batches, numbers=numbers)
        return self._items(iter(self._loader), cut, discard, position.epoch)

    def _items(self, batches: Iterator[Any], cut: Cut, discard: int, epoch: int) -> Generator[Item, None, None]:
        for stream, real, sizes, batch, samples in batches:
            if real == NO_BATCH:
                continue
            if samples is not None and self.comparison is not None:
                self.comparison.samples(samples, epoch, stream)
            rows = cut.rows(real) if cut.batch_size else round_rows(sizes, real, cut.dp_size)
            yield Item(batch, rows, stream, hidden=discard > 0)
            discard -= 1


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
        return length_of(self._loader)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        loader, wanted, read = self._loader, position.consumed, 0
        if callable(getattr(loader, "set_epoch", None)):
            loader.set_epoch(position.epoch)
        if position.mark is not None:
            read, state = position.mark
            if read > wanted:
                raise UsageError(
                    f"{type(loader).__name__} was restored after batch {read} and cannot go back to batch {wanted}",
                    cure="Leave skip_first_batches out: load_state restored the position.",
                )
            loader.load_state_dict(state)
        # Skipped batches are not kept, except the first, which may be needed to fill the last round.
        order, first = StreamedOrder(iter(loader), self.cut.dp_size), Content()
        for batches, real in plan_rounds(order, self.cut, wanted - read):
            rows = round_rows([num_rows(batch) for batch in batches], real, self.cut.dp_size)
            if self.comparison is not None and not first.num_exact:
                first.add(batches)
                # Transforms of such a loader draw from numbers of its own.
                if first.varies:
                    self.comparison.samples(first.exact, position.epoch, position.consumed)
            yield Item(part_of(batches, self._dp_rank), rows, mark=loader.state_dict())
