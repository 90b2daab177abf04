"""Checks that every rank makes the same collective calls, and raises if they differ instead of hanging.

*The call log*: each public method logs its name and the script's line (:func:`log_call`), where the launcher finds it
after the process has ended.

*The desync watchdog*: each collective call of the script is compared over all ranks before it is made: operation,
structure, shapes, dtypes and the line of the script (:func:`check_collective`). The comparison goes through the process
group's store, never through another collective, which could hang just as well.

*Main-process-only calls*: methods that scripts often call on the main process only detect that before their first
collective (:class:`MainProcessOnlyCall`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, BinaryIO, Literal, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from drivetrain.backend import Backend, name_of
from drivetrain.distributed import call_monitor, trees
from drivetrain.distributed.call_monitor import Place
from drivetrain.errors import CollectiveMismatchError, UnsupportedError
from drivetrain.launch.worker import CALL_SITES, CALLS, LAST_CALL, PID, SITE, STOP
from drivetrain.topology import Topology
from drivetrain.wording import likely_cause

logger = logging.getLogger(__name__)

CURE = (
    "Make each call on every rank, from the same line, in the same order: not under `if accelerator.is_main_process:`, "
    "nor after a `break` or `continue` that only some ranks take."
)

_serial = count()
"""Numbers the users of the store, which are made in the same order on every rank."""

_BETWEEN = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent), str(contextlib.__file__))
"""Files whose frames are skipped to find the script's line: ours, torch's, and those of ``with`` blocks."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the script that calls us.

    Args:
        number: from 1.
        text: ``gather at eval.py:88``.
        code: keeps the code object alive whose address is part of the key.
    """

    number: int
    text: str
    code: CodeType


def default_store() -> Any:
    """The store of the default process group."""
    return distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)


class _CallLog:
    """This process's call log, in its own memory or, where there is one, in the launcher's file."""

    numbers: memoryview = memoryview(bytearray(8 * (STOP + 1))).cast("Q")
    file: BinaryIO | None = None


_sites: dict[tuple[str, int, int], CallSite] = {}


def use_launcher_log() -> None:
    """Log calls to the file that our launcher made for this process, if it did. Called once for each accelerator."""
    folder = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _CallLog.file is not None or not folder:
        return
    path = Path(folder).with_name(LAST_CALL)
    if not path.exists():
        return
    with path.open("r+b") as file:
        numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    if numbers[PID] != os.getpid():  # of the worker that started this process
        return
    numbers[CALLS], numbers[SITE] = _CallLog.numbers[CALLS], 0
    _CallLog.numbers = numbers
    _CallLog.file = path.with_name(CALL_SITES).open("ab", buffering=0)
    _CallLog.file.write("".join(f"{site.text}\n" for site in _sites.values()).encode(errors="backslashreplace"))


def log_call(call: str, frames: int = 2) -> str:
    """Log a call of the script; the first line of a public method. Not collective.

    Costs about half a microsecond.

    Args:
        call: the method's name, as users know it.
        frames: how far out the search for the script's line begins: at most as far as the script is.

    Returns:
        ``gather at eval.py:88``.
    """
    site = _call_site(call, sys._getframe(frames))  # noqa: SLF001 (inspect.currentframe is the same with a detour)
    numbers = _CallLog.numbers
    numbers[CALLS] += 1
    numbers[SITE] = site.number
    return site.text


def place_of(call: str, frames: int = 2) -> str:
    """Return what :func:`log_call` does without logging a call."""
    return _call_site(call, sys._getframe(frames)).text  # noqa: SLF001 (as above)


def _call_site(call: str, frame: FrameType) -> CallSite:
    # The table holds only lines of scripts, so that a known one is found without comparing file names.
    while (site := _sites.get((call, id(frame.f_code), frame.f_lasti))) is None:
        file = frame.f_code.co_filename
        if frame.f_back is None or not (file.startswith(_BETWEEN) or _is_of_a_plugin(frame)):
            return _new_site(call, frame)
        frame = frame.f_back
    return site


def _is_of_a_plugin(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("drivetrain_")


def _new_site(call: str, frame: FrameType) -> CallSite:
    code = frame.f_code
    site = CallSite(len(_sites) + 1, f"{call} at {Path(code.co_filename).name}:{frame.f_lineno}", code)
    _sites[call, id(code), frame.f_lasti] = site
    if _CallLog.file is not None:
        _CallLog.file.write(f"{site.text}\n".encode(errors="backslashreplace"))  # a file may be named in any bytes
    return site


def set_stop(value: int) -> None:
    """Record for the launcher how this process handles a request to stop, see :data:`drivetrain.launch.worker.STOP`."""
    _CallLog.numbers[STOP] = value


_ALARM = 1 << 40
"""Added to the count of arrivals by whoever finds the ranks apart; so many arrivals there never are."""

_POLL_SECONDS = 0.0001, 0.01
"""Shortest and longest pause between two looks at the store. The first is about the time of one look."""

_REPORT_SECONDS = 2.0
"""Timeout for the reports of other ranks after a mismatch was found."""


@final
class Watchdog:
    """Compares this process's calls with those of the other ranks. Made in the same order on every rank.

    Args:
        store: of the process group.
        rank: global rank.
        world_size: number of ranks.
        timeout_seconds: how long a rank waits for the others.
        batch_index: number of the batch that the script is at, ``None`` outside of a loop; compared too, since ranks of
            which one has skipped a batch make the same calls.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout_seconds: float, batch_index: Callable[[], int | None]
    ) -> None:
        self._store = dist.PrefixStore(f"watchdog/{next(_serial)}", store)  # type: ignore[attr-defined]
        self._rank, self._world, self._timeout = rank, world_size, timeout_seconds
        self._batch_index = batch_index
        self._calls = 0
        self._slots = ["", ""]
        """Content of the store for the last call of even and of odd number."""
        self._shared = "none"
        """The last call that all ranks made."""
        self._reported = False
        self.suspended = False
        """Calls are not compared for a while."""

    def check(self, call: str) -> None:
        """Wait until every rank is about to make this call. Collective over all ranks, through the store.

        Args:
            call: operation, what it is given, and where.

        Raises:
            CollectiveMismatchError: a rank makes another call, has ended, or does not call in time; on every rank that
            waits, and on the others at their next call.
        """
        call = self._begin(call)
        number, slot = self._calls, self._calls % 2
        try:
            # The first rank writes its call, the others read it. Slots can be reused: a rank gets here only after all
            # ranks have made the call before this one, so the one before that is no longer needed.
            mine = f"{number} {call}"
            first = self._store.compare_set(str(slot), self._slots[slot], mine).decode()
            self._slots[slot] = first
            if first != mine:
                self._store.add("arrived", _ALARM)
                self._raise(call)
            arrived = self._store.add("arrived", 1)
            if not self._all_come(arrived, number * self._world):
                self._raise(call)
        except dist.DistError as error:
            raise CollectiveMismatchError(
                f"{call}: the process that hosts this job's store, rank 0 or the launcher, has ended",
                whose=f"rank {self._rank}; last call that all ranks made: {self._shared}",
                cure=CURE,
            ) from error
        self._shared = call

    def _begin(self, call: str) -> str:
        """Count a call; returns it with the batch that the script is at."""
        self._calls += 1
        index = self._batch_index()
        return call if index is None else f"{call}, batch {index}"

    def give_up(self, call: str) -> None:
        """Raise after a timeout in a call that is not compared. Not collective.

        Raises:
            CollectiveMismatchError: on this rank and the others, with the current call of each.
        """
        call = self._begin(call)
        try:
            self._store.add("arrived", _ALARM)
            self._raise(call)
        except dist.DistError:
            return  # nobody is left who could be told

    def leave(self) -> None:
        """Record that this process's script has ended, for ranks that wait for it. Not collective."""
        try:
            self._report(f"its script has ended; last call that all ranks made: {self._shared}")
            self._store.add("arrived", _ALARM)
        except dist.DistError:
            return  # nobody is left who could be told

    def _all_come(self, arrived: int, wanted: int) -> bool:
        """Wait until all ranks are counted; ``False`` when a rank has set the alarm or time is up."""
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + self._timeout
        alarmed = False
        # A rank that has ended sets the alarm, too, and may have made this call before.
        while arrived % _ALARM < wanted:
            if alarmed:
                return False
            if time.monotonic() > deadline:
                # This rank withdraws its arrival, so that later ranks find the call incomplete. If a rank has arrived
                # at this very moment, it has counted all and gone on, and so does this one.
                if self._store.add("arrived", _ALARM - 1) % _ALARM < wanted - 1:
                    return False
                self._store.add("arrived", 1 - _ALARM)
                return True
            alarmed = arrived >= _ALARM  # trusted only when seen twice, see above
            time.sleep(longest if alarmed else pause)
            pause = min(2 * pause, longest)
            arrived = self._store.add("arrived", 0)
        return True

    def _raise(self, call: str) -> None:
        """Exchange reports with the ranks that wait, and raise an error that contains all of them."""
        self._report(call)
        ranks = range(self._world)
        deadline = time.monotonic() + _REPORT_SECONDS
        while not self._store.check([f"report/{rank}" for rank in ranks]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS[1])
        lines = [f"ranks are apart after {self._calls - 1} equal calls:"]
        lines += [f"  rank {rank}: {self._report_of(rank)}" for rank in ranks]
        raise CollectiveMismatchError("\n".join([*lines, "they would wait for each other"]), cure=CURE)

    def _report(self, doing: str) -> None:
        """Report once what this rank is doing: what it does after an error is irrelevant."""
        if not self._reported:
            self._reported = True
            self._store.set(f"report/{self._rank}", doing)

    def _report_of(self, rank: int) -> str:
        key = f"report/{rank}"
        if self._store.check([key]):
            return str(self._store.get(key).decode())
        return f"has not made this call; last call that all ranks made: {self._shared}"


class _Current:
    """This process's watchdog."""

    watchdog: Watchdog | None = None


def watch(backend: Backend, batch_index: Callable[[], int | None]) -> Watchdog | None:
    """Start to compare calls; ``None`` with one process. Called on every rank or none.

    Args:
        backend: started.
        batch_index: see :class:`Watchdog`.

    Raises:
        UnsupportedError: the ranks have no process group whose store could be used.
    """
    topology = backend.topology
    if topology.world_size == 1:
        return None
    if not dist.is_initialized():
        raise UnsupportedError(
            "desync_watchdog compares ranks through the store of a process group, and "
            f"{name_of(backend)} makes no process group",
            cure="Remove desync_watchdog from the configuration.",
        )
    timeout = backend.settings.process_group.timeout_seconds or default_pg_timeout.total_seconds()
    _Current.watchdog = Watchdog(default_store(), topology.rank, topology.world_size, timeout, batch_index)
    return _Current.watchdog


def stop_watching(watchdog: Watchdog | None) -> None:
    """Stop comparing calls. Not collective; does nothing for ``None`` or a second time."""
    if watchdog is not None and _Current.watchdog is watchdog:
        _Current.watchdog = None
        watchdog.leave()


def check_collective(
    call: str,
    tree: Any = None,
    *,
    compare: Literal["all", "dtypes", "nothing"] = "nothing",
    place: Place | None = None,
    values: tuple[Any, ...] = (),
    data_parallel: bool = False,
) -> None:
    """Log a collective call of the script, and compare it over all ranks: now when a watchdog is active, or later.

    Args:
        call: the method's name, as users know it; ``write to ...`` for a change of the model by the script itself.
        tree: what it is given.
        compare: what of ``tree`` must agree: shapes and dtypes, dtypes and numbers of dims, or nothing.
        place, values: what must agree besides it, as for :class:`drivetrain.distributed.call_monitor.CallMonitor`.
        data_parallel: collective over the data-parallel ranks alone, so that other ranks may make other calls.

    Raises:
        CollectiveMismatchError: see :meth:`Watchdog.check`.
    """
    site = log_call(call)
    monitor = call_monitor.Current.monitor
    if monitor is not None and (monitor.only_data_parallel or not data_parallel):
        monitor.record(call, site, place, values)
    watchdog = _Current.watchdog
    if watchdog is None or watchdog.suspended:
        return
    if compare != "nothing":
        shape = trees.describe(tree) if compare == "all" else trees.describe(tree, lambda leaf: "*" * leaf.dim())
        site = f"{call} of {shape}{site.removeprefix(call)}"
    watchdog.check(site)


def give_up(call: str) -> None:
    """Raise after waiting in vain in a call that is not compared; see :meth:`Watchdog.give_up`."""
    if _Current.watchdog is not None:
        _Current.watchdog.give_up(call)


@contextmanager
def unwatched() -> Iterator[None]:
    """Context in which ranks may make different numbers of calls."""
    comparing = [each for each in (_Current.watchdog, call_monitor.Current.monitor) if each is not None]
    before = [each.suspended for each in comparing]
    for each in comparing:
        each.suspended = True
    try:
        yield
    finally:
        for each, was in zip(comparing, before, strict=True):
            each.suspended = was


PATIENCE_SECONDS = 10.0
"""Timeout of the main process for the other ranks. They have just reduced gradients together with it."""
LATER_PATIENCE_SECONDS = 1.0
"""Timeout after the other ranks have failed to take part once."""


@final
class MainProcessOnlyCall:
    """Detects, through the process group's store, that a collective call is made on the main process only.

    A rank that does not make the call is blocked in another collective, waiting for the main process; so the main
    process decides, and a rank that calls too late reads the decision. Created in the same order on every rank.

    Args:
        topology: the job.
        call: what is called, for the sentence that says who was missing.
        lost: what is lost when the main process goes on alone.
    """

    def __init__(self, topology: Topology, call: str, lost: str) -> None:
        self._rank, self._others = topology.rank, topology.world_size - 1
        self.call, self._lost = call, lost
        self._prefix = f"main_process_only/{next(_serial)}"
        self._times: Counter[int] = Counter()
        self._absent = False

    def called_by_all(self, step: int, site: str) -> bool:
        """Whether all ranks are in this call; ``False`` on the main process if it continues without them.

        ``False`` on another rank means that the main process continued without it. Needs a few store round trips.

        Args:
            step: a number on which the ranks agree, and which seldom recurs.
            site: ``save_state at train.py:88``.

        Raises:
            CollectiveMismatchError: the main process does not call within the process group's timeout, or has ended.
        """
        if not self._others:
            return True
        store = default_store()
        occasion = f"{self._prefix}/{step}/{self._times[step]}"
        self._times[step] += 1
        arrived, decision = f"{occasion}/arrived", f"{occasion}/decision"
        if self._rank != 0:
            try:
                store.add(arrived, 1)
                _wait_for(store, decision)
                return bool(store.get(decision) == b"all")
            except dist.DistError as error:
                give_up(site)
                raise CollectiveMismatchError(
                    f"{site}: the main process has not made this call", whose=f"rank {self._rank}", cure=CURE
                ) from error
        deadline = time.monotonic() + (LATER_PATIENCE_SECONDS if self._absent else PATIENCE_SECONDS)
        pause = 0.0005
        while (here := store.add(arrived, 0)) < self._others and time.monotonic() < deadline:
            call_monitor.raise_if_apart()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        everyone = bool(here >= self._others)
        store.set(decision, "all" if everyone else "main")
        if not everyone and not self._absent:
            self._absent = True
            logger.warning(
                "%s: %d of %d processes did not make this call within %g s; %s. Call it on every process, not under "
                "`if accelerator.is_main_process:`.",
                self.call,
                self._others - here,
                self._others + 1,
                PATIENCE_SECONDS,
                self._lost,
            )
        return everyone


def _wait_for(store: Any, key: str) -> None:
    """Wait for a key as long as the store's time-out allows.

    Raises:
        CollectiveMismatchError: ranks are found to be apart meanwhile.
        DistStoreError: nobody has set it in time.
    """
    deadline = time.monotonic() + store.timeout.total_seconds()
    pause, longest = _POLL_SECONDS[0], 0.2
    while not store.check([key]):
        call_monitor.raise_if_apart()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{key} was not set within {store.timeout}")
        time.sleep(pause)
        pause = min(2 * pause, longest)


def note_likely_cause(error: BaseException) -> None:
    """Add to an error of a communication library what a script can do about it, for ranks that part later.

    Raises:
        CollectiveMismatchError: it is known that ranks are apart, which is the cause.
    """
    cause = likely_cause(str(error))
    monitor = call_monitor.Current.monitor
    if cause and monitor is not None and monitor.error is not None:
        raise CollectiveMismatchError(monitor.error.what, cure=monitor.error.cure) from error
    if cause and cause not in getattr(error, "__notes__", ()):
        error.add_note(cause)
