"""Processes of a loader that go on when a run is told to end: it needs their batches until it has saved itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import final

from torch.utils.data import DataLoader

from drivetrain.launch.stopping import SIGNALS
from drivetrain.runtime.loading.source import clone


@final
class OutlivingInit:
    """A ``worker_init_fn`` after which the process heeds a second signal only.

    Schedulers send SIGTERM to all processes of a job, and a terminal Ctrl-C, these among them. Whoever really means to
    end them asks twice: torch when it gives up on one, then Python when it ends.

    Args:
        function: the user's own.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:  # here, since torch sets handlers when the process has begun
            signal.signal(number, _heed_the_next)
        if self._function is not None:
            self._function(worker)


def outliving(loader: DataLoader[object]) -> DataLoader[object]:
    """The same loader, with processes that go on; itself where it has none."""
    if not loader.num_workers:
        return loader
    return clone(loader, {"worker_init_fn": OutlivingInit(loader.worker_init_fn)})


def _heed_the_next(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
