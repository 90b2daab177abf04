"""The processes of one start on this machine: started, asked how they ended, stopped with all that they started."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

STOP_SECONDS = 30.0
"""How long workers may take to end after a signal before they are killed, as torch's agent gives them."""

_log = logging.getLogger(__name__)
_LOCAL_RANK = "${local_rank}"
"""In an argument it becomes the worker's local rank, as under ``torchrun``."""


class Workers:
    """Processes by local rank, each in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        stdouts: Mapping[int, str],
        stderrs: Mapping[int, str],
    ) -> None:
        """Start one process for each environment.

        Args:
            command: the program and its arguments.
            environments: whole environments, by local rank.
            stdouts, stderrs: paths by local rank; an empty one leaves the stream as the launcher's.

        Raises:
            OSError: the program cannot be started; those before it run.
        """
        for local_rank, environment in environments.items():
            words = [word.replace(_LOCAL_RANK, str(local_rank)) for word in command]
            with contextlib.ExitStack() as opened:
                # The worker has its own copy; ours would keep a pipe from ending.
                stdout, stderr = (_opened(paths[local_rank], opened) for paths in (stdouts, stderrs))
                self._processes[local_rank] = subprocess.Popen(
                    words, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
                )

    def exit_codes(self) -> dict[int, int | None]:
        """By local rank, as :mod:`subprocess` counts; ``None`` for those that run."""
        return {local_rank: process.poll() for local_rank, process in self._processes.items()}

    def stop(self, sent: signal.Signals = signal.SIGTERM, seconds: float = STOP_SECONDS) -> None:
        """End those that still run, and what they started; kill those that do not heed the signal. May be called twice.

        A process that waits inside the kernel, for a device for instance, cannot be killed; it is waited for as long
        again and then left.
        """
        for attempt in (sent, signal.SIGKILL):
            running = [process for process in self._processes.values() if process.poll() is None]
            for process in running:
                _log.warning("process %s is sent %s", process.pid, attempt.name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, attempt)
                    os.killpg(process.pid, signal.SIGCONT)  # one that was halted takes no signal until it goes on
            end = time.monotonic() + seconds
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))


def _opened(path: str, opened: contextlib.ExitStack) -> IO[bytes] | None:
    return opened.enter_context(open(path, "wb")) if path else None  # noqa: PTH123 - the path of a pipe or device, too
