"""Ctrl-C and SIGTERM, as the launcher takes them: workers that save themselves may, all others are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from drivetrain.launch.last_seen import LastSeen, read_workers

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OTHERS = [getattr(signal, name) for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""Signals that stop the workers at once, unless whoever started the launcher has it ignore them, as ``nohup`` does."""

INTERRUPT_SECONDS = 10.0
"""How long workers may take to end after Ctrl-C, when somebody is waiting. One in a collective never hears of it."""

EXIT_RESUMABLE = 75
"""Exit code of a run that saved itself because it was told to end: EX_TEMPFAIL of sysexits.h, "try again later"."""


class ToldToEndError(Exception):
    """Raised in the main thread, wherever it is, when a signal says that the workers are to be stopped."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received)
        self.received = received


class Stopping:
    """What this launcher does when it is told to end; a context manager, in the main thread.

    The first signal is passed on to workers that have said that they save themselves; where any has not,
    :class:`ToldToEndError` is raised, by which all are stopped. A second Ctrl-C kills all of them at once.

    Args:
        records: returns the folder in which the workers that were started last keep their records.
        workers: how many there are on this machine.
    """

    def __init__(self, records: Callable[[], Path], workers: int) -> None:
        self._records, self._workers = records, workers
        self._told: Callable[[signal.Signals], Exception] = ToldToEndError
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}
        self._timer: threading.Timer | None = None
        self._held: list[int] | None = None
        self.received: signal.Signals | None = None
        """The first signal."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in _OTHERS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self.on_signal) for number in (*SIGNALS, *heeded)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self, told: Callable[[signal.Signals], Exception]) -> Iterator[None]:
        """Inside of the block another exception is raised than :class:`ToldToEndError`, for who expects its own."""
        before, self._told = self._told, told
        try:
            yield
        finally:
            self._told = before

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals that arrive inside of the block are heeded at its end."""
        self._held = []
        try:
            yield
        finally:
            arrived, self._held = self._held, None
        for number in arrived:
            self.on_signal(number, None)

    def exit_code(self) -> int:
        """After all workers ended well: 0, or the code with which they stopped because they were told to."""
        return max((seen.stop for seen in self._seen() if seen.stop > 1), default=0)

    def starts_again(self, received: int) -> bool:
        """Whether a run that was stopped by this signal was still starting: it goes on where the one before it saved.

        A worker is starting until it has made its accelerator, and no step can have been trained before all have.
        """
        seen = self._seen()
        is_starting = len(seen) < self._workers or any(not (each.calls or each.stop) for each in seen)
        return received == signal.SIGTERM and is_starting

    def end_leftovers(self) -> None:
        """Kill what is left of the workers and of what they started."""
        for seen in self._seen():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(seen.pid, signal.SIGKILL)

    def _seen(self) -> list[LastSeen]:
        return list(read_workers(self._records()).values())

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The handler of all these signals. Raises, unless the workers are to save themselves."""
        if self._held is not None:
            self._held.append(signum)
            return
        sent = signal.Signals(signum)
        again = self.received is not None
        self.received = self.received or sent
        if again and sent != signal.SIGINT:
            return  # schedulers and terminals repeat themselves, and the former have SIGKILL when they mean it
        if sent not in SIGNALS:
            raise self._told(sent)
        if again:
            self.end_leftovers()
            if self._timer is not None:
                return  # the agent is waiting for them to end
        elif self._workers_save():
            sys.stderr.write(f"{sent.name}: the run saves itself after this step; Ctrl-C stops it at once\n")
            for seen in self._seen():
                # The worker alone: its loaders' processes would die of it.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen.pid, signum)
            return
        self._timer = threading.Timer(INTERRUPT_SECONDS, self.end_leftovers)
        self._timer.daemon = True
        if sent == signal.SIGINT:
            self._timer.start()
        raise self._told(self.received)

    def _workers_save(self) -> bool:
        seen = self._seen()
        return len(seen) == self._workers and all(each.stop for each in seen)
