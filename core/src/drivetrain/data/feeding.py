"""Bringing batches to a device that wants more than a copy: ahead of time, in one shape, or by its own way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from drivetrain.backend import Feeding
from drivetrain.data.plan import Rows
from drivetrain.data.source import Item
from drivetrain.distributed import trees

logger = logging.getLogger(__name__)

LABELS = ("labels", "label")
"""Where a batch with names keeps its labels, as Transformers has it; in a tuple or list they are the last element."""


@final
class Feeder:
    """One pass of a loader under a :class:`~drivetrain.api.Feeding`. Belongs to the script's thread.

    Args:
        feeding: what the backend asks for.
        place: copies a batch to the device; ``None`` leaves it where it is.
        full: rows of a full batch of one rank, 0 where there is no such number.
        dp_rank: whose rows.
    """

    def __init__(self, feeding: Feeding, place: Callable[[Any], Any] | None, full: int, dp_rank: int) -> None:
        self._feeding, self._place, self._full, self._dp_rank = feeding, place, full, dp_rank
        in_thread = feeding.ahead and place is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drivetrain-feeder") if in_thread else None

    def accept(self, item: Item) -> Item:
        """Fill a short batch, and begin to bring it where that happens in a thread."""
        filler = self._feeding.filler
        if filler is not None and not item.rows.whole and item.rows.loaded[self._dp_rank] < self._full:
            item = self._filled(item, filler)
        if self._thread is not None:
            item = item._replace(batch=self._thread.submit(self._bring, item.batch))
        return item

    def deliver(self, batch: Any) -> Any:
        """The batch on its device, from what :meth:`accept` made of it; waits for the thread."""
        sent = batch.result() if isinstance(batch, Future) else self._bring(batch)
        if self._place is None or self._feeding.send is None:
            return sent
        # What is left to move is no tensor but an object with a `to` of its own, which belongs to the script's thread.
        return self._place(sent)

    def close(self) -> None:
        """Let go of the thread; a copy that it has begun is finished."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _bring(self, batch: Any) -> Any:
        if self._place is None:
            return batch
        send = self._feeding.send
        return self._place(batch) if send is None else trees.recursively_apply(send, batch)

    def _filled(self, item: Item, filler: int) -> Item:
        rows = item.rows.loaded[self._dp_rank]
        batch = fill(item.batch, rows, self._full, filler)
        if batch is None:
            if item.batch is not None:
                logger.warning(
                    "The last batch keeps its %d rows, since there are no integer labels that a filled row could have; "
                    "it is compiled for itself.",
                    rows,
                )
            return item
        return item._replace(batch=batch, rows=grown(item.rows, self._full))


def grown(rows: Rows, full: int) -> Rows:
    """The same rows among batches of this size: every rank that has any loads so many."""
    loaded = tuple(full if number else 0 for number in rows.loaded)
    return replace(rows, loaded=loaded, filled=not rows.padded)


def fill(batch: Any, rows: int, full: int, filler: int) -> Any:
    """A batch of ``full`` rows whose further rows repeat the first ones, with ``filler`` for labels. Local.

    Args:
        batch: a mapping with ``labels``, or a tuple or list whose last element holds the labels, as integers.
        rows: how many rows it has.
        full: how many it shall have.
        filler: the label that a loss ignores.

    Returns:
        The filled batch; ``None`` where no labels can be told.
    """
    labels = _labels(batch, rows)
    if labels is None:
        return None
    index = torch.arange(full) % rows

    def grow(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if not leaf.dim() or leaf.shape[0] != rows:
                return leaf
            more = leaf[index.to(leaf.device)]
            if leaf is labels:
                more[rows:] = filler
            return more
        return [leaf[number % rows] for number in range(full)]

    def is_rows(leaf: Any) -> bool:
        plain = isinstance(leaf, list) and not any(isinstance(each, Tensor) for each in leaf)
        return isinstance(leaf, Tensor) or (plain and len(leaf) == rows)

    return trees.recursively_apply(grow, batch, test_type=is_rows)


def _labels(batch: Any, rows: int) -> Tensor | None:
    found = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[-1]
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        return None
    return found if found.dim() and found.shape[0] == rows else None
