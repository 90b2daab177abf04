"""Distributes the batches that the main process reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, final

from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.data.plan import Cut, Position, Rows
from drivetrain.data.source import Item, Source
from drivetrain.distributed import trees
from drivetrain.errors import DrivetrainError

SliceFunction = Callable[..., Any]
"""``slice_fn(batch, tensor_slice, process_index=, num_processes=)`` returns one rank's part of a global batch."""


@final
class DispatchSource(Source):
    """Batches that global rank 0 reads; collective over all ranks, one broadcast for each.

    Other ranks never access the dataset. An exception of the reader is raised on every rank.

    Args:
        inner: reads for all ranks; used on the main process.
        backend: for the broadcast.
        slice_fn: splits a global batch; ``None``: :func:`slice_rows`.
    """

    def __init__(self, inner: Source, backend: Backend, slice_fn: SliceFunction | None) -> None:
        self._inner, self._backend, self._slice = inner, backend, slice_fn
        super().__init__(inner.cut, None, shares=0)
        self.round_units, self.num_streams = inner.round_units, inner.num_streams
        self.generator, self.reading = inner.generator, inner.reading

    @property
    def cut(self) -> Cut:
        """The inner source's."""
        return self._inner.cut

    @cut.setter
    def cut(self, value: Cut) -> None:
        self._inner.cut = value

    def length(self) -> int | None:
        return self._inner.length()

    def read_to_end(self, position: Position) -> None:
        if self._backend.topology.rank == 0:
            self._inner.read_to_end(position)

    def open(self, position: Position, discard: int, *, resumed: bool = False) -> Generator[Item, None, None]:
        if self._backend.topology.rank != 0:
            return self._shown(None)
        return self._shown(self._read(self._inner.open(position, discard, resumed=resumed)))

    def _shown(self, reader: Iterator[tuple[Item | None, bool]] | None) -> Generator[Item, None, None]:
        topology, backend = self._backend.topology, self._backend
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
            if item is not None:
                part = self._part(item, topology.dp_rank, topology.dp_size)
                yield item._replace(batch=part, follows=None, beyond=None)

    def _read(self, items: Iterator[Item]) -> Iterator[tuple[Item | None, bool]]:
        """``(item, nothing follows)`` until the end."""
        try:
            following = next(items, None)
            if following is None:
                yield None, True
            while following is not None:
                item, following = following, None
                if item.follows is None:
                    following = next(items, None)
                    yield item, following is None
                    continue
                # Read on when the batch is asked for, as torch does.
                yield item, not item.follows
                following = next(items, None)
                if following is None and item.follows:
                    self._inner.trusts_length = False
                    yield None, True
        except Exception as error:
            # The others wait for a batch; tell them why there is none before this rank raises.
            self._backend.broadcast_object((f"{type(error).__name__}: {error}", True))
            raise

    def _part(self, item: Item, dp_rank: int, dp_size: int) -> Any:
        if not item.rows.loaded[dp_rank]:
            return None
        if item.rows.whole:
            return item.batch[dp_rank]
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
