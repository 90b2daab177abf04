"""Dispatch: the main process reads every batch and hands it out. For data that only one process can read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, final

from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.data.plan import Rows
from drivetrain.data.position import Identity
from drivetrain.data.source import Item, Source, Start
from drivetrain.distributed import trees
from drivetrain.errors import DrivetrainError

SliceFunction = Callable[..., Any]
"""``slice_fn(batch, tensor_slice, process_index=, num_processes=)`` returns one rank's part of a global batch."""


@final
class DispatchSource:
    """Batches that global rank 0 reads; collective over all ranks, one broadcast for each.

    Ranks that do not read never touch the dataset. An exception of the reader is raised on every rank.

    Args:
        inner: reads for all ranks; used on the main process.
        backend: the way to the other ranks.
        slice_fn: how a global batch is cut; ``None``: :func:`slice_rows`.
    """

    def __init__(self, inner: Source, backend: Backend, slice_fn: SliceFunction | None) -> None:
        self._inner, self._backend, self._slice = inner, backend, slice_fn

        self.cut, self.round_units, self.num_streams = inner.cut, inner.round_units, inner.num_streams

    def identity(self) -> Identity:
        return self._inner.identity()

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
            # The others wait for a batch; they learn why there is none before this rank goes down.
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
