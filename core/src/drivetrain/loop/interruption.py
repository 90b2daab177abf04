"""Saves and stops a run on Ctrl-C or SIGTERM, after a step on which all ranks agree."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any, NoReturn, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from drivetrain.data.active import ActiveLoaders
from drivetrain.distributed.watchdog import set_stop
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.launch.environment import LAUNCHER
from drivetrain.launch.worker import EXIT_RESUMABLE, SIGNALS, handle_signals
from drivetrain.topology import Topology

logger = logging.getLogger(__name__)

_SAVES_FIRST = 1
_ASKED, _READY, _KEY = "asked", "ready", "stop"
"""Keys of the store: a rank has received a signal; number of ranks that poll after each step; step and signal."""

_LISTEN_SECONDS = 0.2
"""Between two looks of the thread. A look costs the training a tenth of a millisecond at most, while it lasts."""

_READY_SECONDS = 10 * _LISTEN_SECONDS
"""Timeout for the threads of the other ranks, once, on the rank that received the signal."""

_serial = count()


@final
class Interruption:
    """Ends the run on a signal, after a step on which all ranks agree. Created in the same order on every rank.

    A step ends where the loop asks a prepared loader for its next batch after an optimizer stepped: by then the script
    has moved its scheduler, and the loader's position is that of the next step. Without a prepared loader it ends with
    ``optimizer.step()``. Until a signal arrives a step costs a look at an attribute, no collective and no message.

    **Agreement.** The rank that receives the signal notifies a thread of every rank through the process group's store;
    from then on each rank checks the store at the end of each step. When all have been notified, it announces the end
    of the *next* step. No rank can have reached that already: the step needs gradients of this rank.

    Args:
        topology: the job.
        active: the loaders that are being iterated.
        save: saves the run and returns the folder; collective.
        finish: ends the run; collective.
    """

    def __init__(
        self, topology: Topology, active: ActiveLoaders, save: Callable[[], str], finish: Callable[[], None]
    ) -> None:
        self._active, self._save, self._finish = active, save, finish
        self._store = _store(topology)
        self._world = topology.world_size
        self._is_main = topology.rank == 0
        self._heard: signal.Signals | None = None
        self._asked = self._announced = False
        self._steps = 0
        self.stepped_in: int | None = None
        """Number of the loader whose batch the last step trained on, until the step's end."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "save_on_interrupt takes signals, which only the main thread of a process can",
                cure="Make the Accelerator in the main thread, or leave save_on_interrupt out.",
            )
        self._pid = os.getpid()
        self._before = handle_signals(dict.fromkeys(SIGNALS, self._on_signal))
        set_stop(_SAVES_FIRST)
        self._listener = None if self._store is None else _Listener(self._store)

    def close(self) -> None:
        """Restore the signal handlers. May be called twice."""
        if self._before:
            handle_signals(self._before)
            set_stop(0)
        if self._listener is not None:
            self._listener.close()
        self._before = {}

    def stepped(self) -> None:
        """Handle an optimizer step. Collective where no prepared loader is iterated."""
        current = self._active.current
        if current is None:
            self.step_ends()
        else:
            self.stepped_in = current.loader.number

    def step_ends(self) -> None:
        """Save and end the run when the ranks have agreed on this step. Collective over all ranks, then.

        Raises:
            SystemExit: after the run was saved.
        """
        self.stepped_in = None
        self._steps += 1
        agreed = self._agreement()
        if agreed is not None and self._steps >= agreed[0]:
            self._stop(agreed[1])

    def _agreement(self) -> tuple[int, signal.Signals] | None:
        """The step to stop after, and why; ``None`` to go on."""
        if self._store is None or self._listener is None:
            return None if self._heard is None else (self._steps, self._heard)
        if self._heard is not None and not self._asked:
            self._asked = True
            self._ask()
        if not self._listener.alert:
            return None
        if self._heard is not None and not self._announced and self._store.add(_READY, 0) >= self._world:
            self._announced = True
            self._store.compare_set(_KEY, "", f"{self._steps + 1} {int(self._heard)}")
        elif not self._store.check([_KEY]):
            return None
        step, number = self._store.get(_KEY).decode().split()
        return int(step), signal.Signals(int(number))

    def _ask(self) -> None:
        """Notify every rank to check at the end of its steps; if a thread does not respond soon, training continues."""
        self._store.set(_ASKED, "1")
        deadline = time.monotonic() + _READY_SECONDS
        while self._store.add(_READY, 0) < self._world and time.monotonic() < deadline:
            time.sleep(_LISTEN_SECONDS / 20)

    def _stop(self, why: signal.Signals) -> NoReturn:
        folder = self._save()
        self._finish()
        if self._is_main:
            logger.warning("%s: this run saved itself in %s and stops.", why.name, folder)
        code = EXIT_RESUMABLE if why == signal.SIGTERM else 128 + why
        set_stop(code)
        # Our launcher reads the code from the record: torch's agent treats any exit code as a failure and restarts.
        raise SystemExit(0 if os.environ.get(LAUNCHER) else code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            if self._heard is None:
                self._heard = signal.Signals(number)
                return
            if number == signal.SIGTERM:  # comes twice if a scheduler signals every process and a launcher forwards it
                return
        # A second Ctrl-C, to stop at once; or in a process that the script has forked.
        signal.signal(number, self._before[signal.Signals(number)])
        os.kill(os.getpid(), number)


@final
class _Listener:
    """A thread that waits for a signal on any rank, so that the training need not check after each step."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._closed = threading.Event()
        self.alert = False
        """A rank has received a signal: the training polls the store from now on."""
        self._thread = threading.Thread(target=self._listen, name="drivetrain-stop", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # torch's C++ aborts a program that ends while a thread returns from the store

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._closed.set()
        self._thread.join(10 * _LISTEN_SECONDS)
        atexit.unregister(self.close)

    def _listen(self) -> None:
        while not self._closed.wait(_LISTEN_SECONDS):
            try:
                if self._store.check([_ASKED]):
                    self.alert = True  # before it is counted: the rank that counts relies on it
                    self._store.add(_READY, 1)
                    return
            except dist.DistError:
                return  # the job is failing; the training notices by itself


def _store(topology: Topology) -> Any:
    """The store through which ranks agree; ``None`` with one process."""
    if topology.world_size == 1:
        return None
    if not dist.is_initialized():
        raise UnsupportedError(
            "save_on_interrupt lets ranks agree through a process group's store, and this backend forms none",
            cure="Leave save_on_interrupt out.",
        )
    store = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
    return dist.PrefixStore(f"interruption/{next(_serial)}", store)  # type: ignore[attr-defined]
