"""Routes DeepSpeed's messages to ``logging`` instead of stdout."""

from __future__ import annotations

import logging
import warnings
from typing import final

_THEIRS = "DeepSpeed"
_OURS = "drivetrain_deepspeed.engine"

_NO_NEWS = (
    # `elementwise.check` has accepted or refused this optimizer, with a message of its own for third-party ones.
    "You are using ZeRO with an untested optimizer",
    # A schedule's own first reading of its learning rate.
    "Attempting to get learning rate from scheduler before it has started",
)
_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""DeepSpeed calls them, torch warns on every rank; a script can do nothing about it."""


@final
class _Forward(logging.Handler):
    """Hands records to our logger: warnings once, by rank 0; errors by every rank, with the rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size
        self._target = logging.getLogger(_OURS)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        if record.levelno < logging.ERROR and self._rank != 0:
            return
        text = record.getMessage()
        if any(each in text for each in _NO_NEWS) or not self._target.isEnabledFor(record.levelno):
            return
        if self._world_size > 1 and record.levelno >= logging.ERROR:
            record.msg, record.args = f"[rank {self._rank}] {text}", ()
        record.name = _OURS
        self._target.handle(record)


@final
class Tamed:
    """DeepSpeed's logger and torch's warnings about it, held from :meth:`__init__` until :meth:`release`.

    Args:
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        theirs = logging.getLogger(_THEIRS)
        self._before = (list(theirs.handlers), theirs.level, theirs.propagate)
        theirs.handlers = [_Forward(rank, world_size)]
        theirs.propagate = False
        theirs.setLevel(logging.getLogger(_OURS).getEffectiveLevel())
        warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
        self._filter = warnings.filters[0]

    def release(self) -> None:
        """Restore the logger. May be called twice."""
        theirs = logging.getLogger(_THEIRS)
        handlers, level, propagate = self._before
        theirs.handlers, theirs.propagate = handlers, propagate
        theirs.setLevel(level)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
