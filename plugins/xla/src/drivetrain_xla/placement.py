"""Copies batches to the device ahead of the script, and pads a short last batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from drivetrain.api.engines import trees

logger = logging.getLogger(__name__)

LABELS = ("labels", "label")
"""Keys of labels in a mapping, as in Transformers; in a tuple or list they are the last element."""


@final
class BatchPlacement:
    """Copies batches to the device. Used by the script's thread only.

    Samples are always read by the script's own thread, so that random numbers are drawn in the same order.

    Args:
        send: copies one tensor of a batch to the device. In a thread ``tensor.to(device)`` must not run beside the
            script's graphs.
        ahead: send the next batch in a thread while the script works on this one.
        filler: fill the last batch of an epoch up to the size of the others, for a device that compiles anew for each
            shape: rows are repeated, and their labels become this number, which the loss must ignore. ``None`` leaves
            batches as they are.
    """

    def __init__(self, send: Callable[[Tensor], Tensor], *, ahead: bool = False, filler: int | None = None) -> None:
        self._send, self._ahead, self._filler = send, ahead, filler
        self._thread: ThreadPoolExecutor | None = None

    def place(
        self, batch: Any, rows: int, full_rows: int, move: Callable[[Any], Any] | None
    ) -> tuple[Callable[[], Any], int]:
        """See :meth:`drivetrain.api.Backend.place_batch`."""
        if self._filler is not None and rows < full_rows:
            filled = fill(batch, rows, full_rows, self._filler)
            if filled is not None:
                batch, rows = filled, full_rows
            else:
                logger.warning(
                    "The last batch keeps its %d rows, since there are no integer labels that a filled row could have; "
                    "it is compiled for itself.",
                    rows,
                )
        if move is None:
            return lambda: batch, rows
        send: Callable[[], Any] = partial(trees.recursively_apply, self._send, batch)
        if self._ahead:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="drivetrain-batches")
            send = self._thread.submit(send).result
        # Other objects have a `to` of their own, which must run in the script's thread.
        return lambda: move(send()), rows

    def close(self) -> None:
        """Let go of the thread; a copy that it has begun is finished."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None


def fill(batch: Any, rows: int, full: int, filler: int) -> Any:
    """Pad a batch to ``full`` rows by repeating the first ones, with ``filler`` for labels. Local.

    Args:
        batch: a mapping with ``labels``, or a tuple or list whose last element holds the labels, as integers.
        rows: how many rows it has.
        full: how many it shall have.
        filler: the label that a loss ignores.

    Returns:
        The filled batch; ``None`` where no labels can be found.
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
