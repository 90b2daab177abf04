"""Compares the calls of all ranks in the background, and reports ranks that wait for each other.

Each rank keeps the calls of its script in memory: the operation, the line, the batch, and values that must be the same
on all ranks. A thread of each rank compares a digest of them with that of the next lower rank about once a second, so
that a difference between any two ranks is found by some pair, at a constant number of messages for each rank. They go
through a connection of their own to the process group's store, never through a collective or the engine's connection.

*Calls are compared by number, not by time*: the k-th call of one rank with the k-th of another, whatever their speed.
The line of a call is reported and not compared, since the same call may be at two lines of a script.

*A rank that hangs* is reported by its thread: after a while without a call the thread publishes where the main thread
is, and the first rank that has waited long enough composes one report of all.

*A rank whose calls differ and that waits* in a collective would wait until the engine's time-out. Its thread ends the
process with the report, as an exception of the main thread would.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import json
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, final

import torch.distributed as dist

from drivetrain.errors import CollectiveMismatchError
from drivetrain.launch.failures import is_of_a_library, script_line

logger = logging.getLogger(__name__)

Place = tuple[int, int, int]
"""Number of a loader, its epoch and the index of a batch in it."""

CURE = (
    "Let all ranks decide alike: `accelerator.set_trigger()` on a rank that decides and `accelerator.check_trigger()` "
    "on all, or a condition that is reduced first (`accelerator.reduce(flag, 'max')`); or make the loss 0 instead of "
    "skipping its backward. Settings of optimizers must be the same on every rank. rank_monitor: {enabled: false} in "
    "the configuration turns this comparison off."
)

KEPT_CALLS = 4096
"""Number of calls that a rank keeps with their digests: about a second of the fastest measured loops."""

_ERA = 1 << 40
"""Numbers of calls restart at the next multiple of it after a reset; no run makes as many calls."""

_REPORT_SECONDS = 5.0
"""Time-out for another rank's part of a report, beside the interval at which ranks look."""

_SIGN_SECONDS = 2.0
"""Least time for a rank to publish again, before it is said to give no sign of life."""

_SAMPLES = 20
"""Most samples of the main thread in a look, until one shows that it moves: loops are mostly at one instruction."""

_SAMPLE_SECONDS = 0.005
"""Pause between two samples of one look, the time after which Python lets another thread run."""

_END_SECONDS = 10.0
"""Least time in one collective after ranks were found apart, before the process of a rank ends with the report."""

_AGREE_SECONDS = 10.0
"""Time-out of a save, or of the end of the training, for other ranks to compare; then the comparison goes on later."""

_PAUSE_SECONDS = 0.0002, 0.02
"""Shortest and longest pause between two looks of a rank that waits."""

_STEPS = frozenset({"step", "train_step"})
_LONG_PHASES = ("evaluation", "compile")
_LONG_CALLS = ("save_state", "save_model", "load_state", "prepare", *_LONG_PHASES)

_HERE = str(Path(__file__).parent.parent)
_READING = (f"{_HERE}/data/loader.py", f"{_HERE}/data/source.py")
_COMMUNICATION = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")

_serial = count()
"""Numbers the monitors, which are made in the same order on every rank."""


class _Told(NamedTuple):
    """A value that must be the same on all ranks that publish it.

    With ``warning`` it should differ, or, with ``numbers``, it should be about the same.
    """

    key: str
    digest: int
    text: str
    what: str = ""
    cure: str = ""
    warning: str = ""
    numbers: tuple[float, ...] = ()


class _Numbered(NamedTuple):
    """A call with its place among all of this rank: ``step`` counts optimizer steps before it."""

    number: int
    digest: int
    step: int
    call: str
    site: str
    place: Place | None
    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        """``backward at train.py:35, batch 3 of epoch 0``."""
        return ", ".join(filter(None, (self.site, _batch(self.place), _described(self.call, self.values))))


@final
class CallMonitor:
    """Compares this process's calls with those of the other ranks, in a thread. Made in the same order on every rank.

    Args:
        store: of the process group; a connection of its own is made to it.
        rank: global rank.
        world_size: number of ranks.
        interval_seconds: between two checks.
        standstill_seconds: without a call, after which ranks that wait are reported.
        compares: ``False``: only a standstill is reported.
        only_data_parallel: all ranks are data-parallel, so that collectives over those are calls of all ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        interval_seconds: float = 1.0,
        standstill_seconds: float = 60.0,
        compares: bool = True,
        only_data_parallel: bool = True,
    ) -> None:
        self._store = dist.PrefixStore(f"call_monitor/{next(_serial)}", _connection(store))  # type: ignore[attr-defined]
        self._rank, self._world = rank, world_size
        # One server answers all ranks: at 1,000 of them it gets about 3,000 messages a second.
        self._interval = interval_seconds * max(1.0, world_size / 1000)
        self._limit, self._compares = standstill_seconds, compares
        self.only_data_parallel = only_data_parallel
        self.users = 1
        """Accelerators that it serves."""
        self.suspended = False
        """Ranks may make different calls for a while."""
        self.era = 0
        """Number of resets of the numbering."""
        self.error: CollectiveMismatchError | None = None
        """Set if calls differ between ranks, for the next call."""
        self._raised = self._told = False
        self._stuck_since = math.inf
        """Time since which the main thread has been at one place in a collective, after calls were found to differ."""
        self._pending: deque[tuple[str, str, Place | None, tuple[Any, ...]]] = deque()
        self._append: Callable[[tuple[str, str, Place | None, tuple[Any, ...]]], object] = self._pending.append
        self._lock = threading.Lock()
        self._history: deque[tuple[int, int, int, str, str, Place | None, tuple[Any, ...]]] = deque(maxlen=KEPT_CALLS)
        """The fields of :class:`_Numbered`."""
        self._number = self._digest = self._steps = 0
        self._codes: dict[str, int] = {}
        self._saved: deque[tuple[int, str]] = deque(maxlen=100)
        self._told_values: deque[_Told] = deque()
        self._told_keys: set[str] = set()
        self._telling = threading.Lock()
        self.before_agreement: dict[int, Callable[[], None]] = {}
        """Functions that publish pending values, by loader."""
        self._may_be_same: list[tuple[str, str]] = []
        """On rank 0: keys for which other ranks may have published the same value, with the warning."""
        self._may_differ: list[tuple[str, _Told]] = []
        """On rank 0: keys for which other ranks may have published other numbers."""
        self._warned: set[str] = set()
        """On rank 0: topics of which ranks have published other numbers."""
        self._left: tuple[int, int] | None = None
        """Number and digest of the next lower rank that are not compared yet."""
        self._left_is_there = False
        self._agreements = 0
        self._seen, self._since = 0, time.monotonic()
        self._looks, self._episode, self._quiet_until = 0, 0, 0.0
        self._frames: deque[tuple[str, int]] = deque(maxlen=5)
        """Stack and instruction of the main thread at the last samples."""
        self._moves = False
        self._main = threading.get_ident()
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="drivetrain-call-monitor", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # torch's C++ aborts a program that ends while a thread returns from the store

    # ---- the script's thread ------------------------------------------------------------------------------------

    def record(self, call: str, site: str, place: Place | None = None, values: tuple[Any, ...] = ()) -> None:
        """Record a call that all ranks make. Takes a few tenths of a microsecond.

        Args:
            call: the operation.
            site: ``backward at train.py:35``.
            place: the batch, where ranks must be at the same one.
            values: numbers, and tuples of numbers, that must be the same on all ranks. Anything else is not compared.

        Raises:
            CollectiveMismatchError: an earlier call differed between ranks.
        """
        if self.error is not None:
            self.refuse()
        if not self.suspended:
            self._append((call, site, place, values))

    def tell(self, key: str, digest: int, text: str, *, what: str, cure: str) -> None:
        """Compare a value over the ranks that publish it, which need not be all; once for each key.

        Where it differs, every rank raises at its next call.

        Args:
            key: of the value.
            digest: of it.
            text: describes it on this rank.
            what, cure: of the error.

        Raises:
            CollectiveMismatchError: calls differ between ranks already.
        """
        if self.error is not None:
            self.refuse()
        self._tell(_Told(key, digest, text, what, cure))

    def tell_same(self, key: str, digest: int, warning: str) -> None:
        """Log a warning on rank 0 if every rank publishes the same value; once for each key."""
        self._tell(_Told(key, digest, "", warning=warning))

    def tell_alike(self, topic: str, time: int, numbers: tuple[float, ...], warning: str) -> None:
        """Log a warning on rank 0, once for each topic, if ranks publish numbers that differ by more than a thousandth.

        Lists of other lengths are not compared.

        Args:
            topic: of the numbers.
            time: of the topic at which these were found; numbers of one time are compared.
            numbers: of this rank, at least one.
            warning: what it means; two ranks and their numbers follow.
        """
        if topic not in self._warned:
            self._tell(_Told(f"{topic}/{time}", 0, topic, warning=warning, numbers=numbers))

    def _tell(self, told: _Told) -> None:
        told = told._replace(key=f"{self.era}/{told.key}")
        if not self.suspended and told.key not in self._told_keys:
            self._told_keys.add(told.key)
            self._told_values.append(told)

    def saved(self, path: str) -> None:
        """Record a checkpoint, for a report of calls that differed before it."""
        self._saved.append((self._number + len(self._pending), path))

    def begin_anew(self) -> None:
        """Restart the numbering of calls after ranks made different ones and have synchronised. Called by all ranks."""
        self._drain()
        self.era += 1
        with self._lock:
            self._history.clear()
            self._number = (self._number // _ERA + 1) * _ERA
            self._digest = self._number

    def agree(self, *, patient: bool = False) -> None:
        """Compare all calls so far over all ranks. Collective over all ranks, through the store.

        Args:
            patient: wait for all ranks, as a collective would that follows. Otherwise those that do not come within 10
                seconds are not waited for; their calls are compared later.

        Raises:
            CollectiveMismatchError: ranks are apart.
        """
        if self.error is not None:
            self.refuse()
        if self.suspended or not self._compares or not self._thread.is_alive():
            return
        for tell in self.before_agreement.values():
            tell()
        self._drain()
        mine = f"{self._number} {self._digest}"
        key = f"agree/{self._agreements}"
        self._agreements += 1
        seconds = math.inf if patient else _AGREE_SECONDS
        try:
            self._compare_told()
            rank, _, first = self._store.compare_set(key, "", f"{self._rank} {mine}").decode().partition(" ")
            if first != mine:
                self._store.compare_set("alarm", "", f"{rank} {self._rank}")
                self._wait(lambda: self.error is not None, 4 * _REPORT_SECONDS + 4 * self._interval)
            elif self._store.add(f"{key}/ranks", 1) < self._world:
                self._wait(lambda: self.error is not None or self._store.add(f"{key}/ranks", 0) >= self._world, seconds)
            if self._store.check(["alarm"]):
                # Of a value that another rank has told before it came here.
                self._wait(lambda: self.error is not None, 4 * _REPORT_SECONDS + 4 * self._interval)
            self._warn_of_told()
        except dist.DistError:
            return  # the job is failing; what follows says how
        if self.error is not None:
            self.refuse()

    def close(self) -> None:
        """End the thread. Not collective; may be called twice."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_REPORT_SECONDS)
        atexit.unregister(self.close)

    def refuse(self) -> NoReturn:
        """Raise the error, once the other ranks have had time to read the report: the store may end with this one.

        Raises:
            CollectiveMismatchError: always.
        """
        assert self.error is not None
        if not self._raised:
            self._raised = True
            with contextlib.suppress(dist.DistError):  # nobody is left who could read it
                self._wait(lambda: self._store.add("read", 0) >= self._world, 2 * self._interval)
        raise CollectiveMismatchError(self.error.what, cure=self.error.cure)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, checked whenever the thread is woken. Returns whether it became true in time."""
        deadline = time.monotonic() + seconds
        pause, longest = _PAUSE_SECONDS
        self._wake.set()
        while not condition():
            if time.monotonic() > deadline or (self._closing and threading.current_thread() is self._thread):
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    # ---- the monitor's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(self._interval)
                self._wake.clear()
                if not self._closing:
                    self._look()
            self._publish("its script has ended the training", moves=False)
        except dist.DistError:
            # The store is gone, with the rank that keeps it, of which not every engine hears.
            while self.error is not None and not (self._closing or self._raised):
                self._wake.wait(self._interval)
                self._end_if_stuck(time.monotonic())
        finally:
            self._append = _forget
            self._pending.clear()

    def _look(self) -> None:
        """Publish how far this rank is, compare with the next lower rank, and report what is wrong."""
        self._drain()
        now = time.monotonic()
        if self._number != self._seen:
            self._seen, self._since = self._number, now
            self._frames.clear()
        idle = now - self._since
        self._publish(self._where() if idle >= min(2 * self._interval, self._limit / 2) else "", moves=self._moves)
        if self.error is None:
            self._compare_told()
            self._warn_of_told()
            if self._rank and self._compares:
                self._compare_left()
            if idle >= 2 * self._interval and self._rank + 1 < self._world and self._compares:
                self._compare_right()
            if self._store.check(["alarm"]):
                self._resolve()
        elif not self._raised:
            if not self._told:
                # One more look later the main thread would have raised, if it were not waiting for another rank.
                self._told = True
                if not self._rank:
                    logger.warning("%s", self.error.what)  # The cure stands with the error that follows.
            self._end_if_stuck(now)
        if self.error is None:
            self._report_standstill(idle)

    def _drain(self) -> None:
        """Number the calls since the last look, and chain their digests."""
        with self._lock:
            while self._pending:
                call, site, place, values = self._pending.popleft()
                plain = _plain(values) if values else ()
                if (code := self._codes.get(call)) is None:
                    code = self._codes[call] = zlib.crc32(call.encode())
                # Of numbers alone, whose hash is the same in every process.
                self._digest = hash((self._digest, code, place or (), plain))
                self._number += 1
                # Plain tuples, which take a fifth of the time of named ones.
                self._history.append((self._number, self._digest, self._steps, call, site, place, plain))
                if call in _STEPS:
                    self._steps += 1

    def _publish(self, where: str, *, moves: bool) -> None:
        self._looks += 1
        last = self._last_text()
        idle = time.monotonic() - self._since
        said = f"{self._number} {self._digest} {self._looks} {idle:.0f} {int(moves)}\n{where}\n{last}"
        self._store.set(f"status/{self._rank}", said)

    def _compare_left(self) -> None:
        """Compare with the last published digest of the next lower rank, once this rank has got as far."""
        key = f"status/{self._rank - 1}"
        if self._left is None:
            self._left_is_there = self._left_is_there or self._store.check([key])
            if not self._left_is_there:
                return
            published = self._store.get(key).decode().split()
            self._left = int(published[0]), int(published[1])
        number, theirs = self._left
        if number > self._number:
            return
        self._left = None
        own = self._at(number)
        if own is not None and own.digest != theirs:
            self._store.compare_set("alarm", "", f"{self._rank - 1} {self._rank}")

    def _compare_right(self) -> None:
        """Compare with what the next higher rank has published: where it waits, it does not get as far as this one."""
        key = f"status/{self._rank + 1}"
        if self._store.check([key]):
            number, theirs = map(int, self._store.get(key).decode().split(maxsplit=2)[:2])
            own = self._at(number)
            if own is not None and own.digest != theirs:
                self._store.compare_set("alarm", "", f"{self._rank} {self._rank + 1}")

    def _compare_told(self) -> None:
        """Compare the values that this rank has published since the last check with the first rank's, by key."""
        with self._telling:  # the other thread of this process waits until they are compared
            while self._told_values:
                told = self._told_values.popleft()
                key = f"told/{told.key}"
                if told.numbers:
                    self._compare_numbers(key, told)
                    continue
                mine = json.dumps([told.digest, self._rank, told.text])
                digest, rank, text = json.loads(self._store.compare_set(key, "", mine).decode())
                if told.warning:
                    self._store.add(f"{key}/ranks", 1 if digest == told.digest else _ERA)
                    if not self._rank:
                        self._may_be_same.append((f"{key}/ranks", told.warning))
                elif digest != told.digest:
                    both = [f"  rank {one}: {said}" for one, said in sorted([(rank, text), (self._rank, told.text)])]
                    self._store.compare_set("alarm", "", json.dumps(["\n".join([told.what, *both]), told.cure]))

    def _compare_numbers(self, key: str, told: _Told) -> None:
        """Publish numbers that should be alike; name the two ranks where they are not."""
        mine = json.dumps([self._rank, told.numbers])
        rank, numbers = json.loads(self._store.compare_set(key, "", mine).decode())
        pairs = [
            (theirs, own)
            for theirs, own in zip(numbers, told.numbers, strict=False)
            if not math.isclose(theirs, own, rel_tol=1e-3, abs_tol=1e-12)
        ]
        if pairs and len(numbers) == len(told.numbers):
            (first, number), (second, other) = sorted([(rank, pairs[0][0]), (self._rank, pairs[0][1])])
            self._store.set(f"{key}/apart", f" Rank {first} has {number:.6g}, rank {second} has {other:.6g}.")
        if not self._rank:
            self._may_differ.append((f"{key}/apart", told))

    def _warn_of_told(self) -> None:
        """Warn if all ranks have published the same value that should differ, or one of them other numbers."""
        if not (self._may_be_same or self._may_differ):
            return
        with self._telling:
            for key, told in self._may_differ:
                if told.text not in self._warned and self._store.check([key]):
                    self._warned.add(told.text)
                    logger.warning("%s%s", told.warning, self._store.get(key).decode())
            self._may_differ = [(key, told) for key, told in self._may_differ if told.text not in self._warned]
            for key, warning in list(self._may_be_same):
                number = self._store.add(key, 0)
                if number >= self._world:
                    self._may_be_same.remove((key, warning))
                    if number == self._world:
                        logger.warning("%s", warning)

    def _at(self, number: int) -> _Numbered | None:
        with self._lock:
            first = self._number - len(self._history) + 1
            return _Numbered(*self._history[number - first]) if first <= number <= self._number else None

    def _last_text(self) -> str:
        return _Numbered(*self._history[-1]).text if self._history else ""

    # ---- ranks that are apart -----------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Find the first call in which two neighbouring ranks differ, and exchange what all did there."""
        alarm = self._store.get("alarm").decode()
        if alarm.startswith("["):
            what, cure = json.loads(alarm)
            self._store.add("read", 1)
            self.error = CollectiveMismatchError(what, cure=cure)
            return
        one, other = map(int, alarm.split())
        self._store.set(f"digests/{self._rank}", self._packed_digests())
        different = 0
        if self._rank:
            different = self._first_different(self._read(f"digests/{self._rank - 1}") or "")
        self._store.set(f"first/{self._rank}", f"{different} {self._number}")
        if self._rank == other:
            said = [(self._read(f"first/{rank}") or "0 0").split() for rank in range(self._world)]
            found = [int(number) for number, _ in said if int(number)]
            # Ranks that differ in nothing else have made different numbers of calls.
            self._store.set("first", str(min(found) if found else min(int(last) for _, last in said) + 1))
        first = int(self._read("first") or 0)
        self._drain()
        self._store.set(f"call/{self._rank}", self._account(first))
        if self._rank == other:
            self._store.set("report", self._composed(first))
        report = self._read("report") or f"ranks {one} and {other} are apart"
        self._store.add("read", 1)
        self.error = CollectiveMismatchError(report, cure=CURE)

    def _read(self, key: str) -> str | None:
        """Read what a rank is about to write; ``None`` where it does not in time."""
        there = self._wait(lambda: bool(self._store.check([key])), 2 * self._interval + _REPORT_SECONDS)
        return str(self._store.get(key).decode()) if there else None

    def _packed_digests(self) -> str:
        with self._lock:
            kept = list(self._history)[-KEPT_CALLS // max(1, self._world // 64) :]
            digests = array.array("q", [digest for _, digest, *_ in kept])
            return f"{self._number - len(digests) + 1} {digests.tobytes().hex()}"

    def _first_different(self, packed: str) -> int:
        """Number of the first call that differs from the next lower rank's; 0 where none that is remembered does."""
        begin, _, data = packed.partition(" ")
        if not begin:
            return 0
        digests = array.array("q")
        digests.frombytes(bytes.fromhex(data))
        theirs = dict(enumerate(digests, int(begin)))
        with self._lock:
            mine = {number: digest for number, digest, *_ in self._history}
        return next((each for each in sorted(theirs.keys() & mine.keys()) if theirs[each] != mine[each]), 0)

    def _account(self, number: int) -> str:
        """This rank's call of a number, and what it has saved since."""
        call = self._at(number)
        if call is None:
            text, step = f"has not made it; its last: {self._last_text() or 'none'}", self._steps
        else:
            text, step = call.text, call.step
        saved = [path for at, path in self._saved if number and at >= number]
        return "\n".join([f"{step}", f"{'' if call is None else call.call}", text, *saved])

    def _composed(self, number: int) -> str:
        told: dict[str, list[int]] = {}
        saved: dict[str, None] = {}
        calls, steps = set(), set()
        for rank in range(self._world):
            step, call, text, *paths = (self._read(f"call/{rank}") or "\n\nhas not answered").split("\n")
            told.setdefault(text, []).append(rank)
            saved |= dict.fromkeys(paths)
            if call:
                calls.add(call)
                steps.add(int(step))
        begin = "ranks are apart"
        if number:
            begin += f" since call {number % _ERA}, in optimizer step {min(steps, default=0)}"
        lines = [f"{begin}:", *_by_ranks(told), _consequence(calls)]
        if saved:
            lines.append(f"saved since then, and not to be resumed from: {', '.join(saved)}")
        return "\n".join(lines)

    def _end_if_stuck(self, now: float) -> None:
        """End this process with the error where the main thread waits in a collective, in which it cannot raise it."""
        where = self._where()
        if not where.startswith("waits ") or self._moves or self._last_text().startswith(_LONG_CALLS):
            self._stuck_since = math.inf
            return
        self._stuck_since = min(self._stuck_since, now)
        frame = sys._current_frames().get(self._main)  # noqa: SLF001
        if now - self._stuck_since < _END_SECONDS or frame is None:
            return
        assert self.error is not None
        trace: TracebackType | None = None
        while frame is not None:
            trace, frame = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno), frame.f_back
        handled: Any = sys._current_exceptions().get(self._main)  # noqa: SLF001 (the only way to another thread's error)
        # Python 3.11 has a triple where later ones have the exception.
        self.error.__context__ = handled[1] if isinstance(handled, tuple) else handled
        # What is called for an exception that nobody catches: it prints it, or hands it to the launcher.
        sys.excepthook(type(self.error), self.error.with_traceback(trace), trace)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    # ---- ranks that wait ----------------------------------------------------------------------------------------

    def _where(self) -> str:
        """Describe where the main thread is, ``in backward at train.py:35``, and record whether it has moved."""
        stack = self._sample()
        if not stack:
            ended = self._main not in sys._current_frames()  # noqa: SLF001
            return "has ended its main thread" if ended else "has too many threads to tell where its main one is"
        waits = _communicates(stack)
        samples = 1
        while not (waits or self._moves or samples == _SAMPLES):
            time.sleep(_SAMPLE_SECONDS)
            self._sample()
            samples += 1
        return f"{'waits ' if waits else ''}{script_line(stack, newest_first=True)}"

    def _sample(self) -> str:
        """Return the main thread's stack, and record whether it is at another instruction than before."""
        stack = _stack_of(self._main)
        frame = sys._current_frames().get(self._main)  # noqa: SLF001
        if stack and frame is not None:
            self._frames.append((stack, frame.f_lasti))
            self._moves = len(set(self._frames)) > 1
        return stack

    def _report_standstill(self, idle: float) -> None:
        """Report once which ranks wait for which, if this rank has made no call for long. Not collective."""
        if idle < self._limit:
            if self._rank or idle < self._interval:
                return
        elif time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + self._limit
            mine = str(self._rank)
            if self._store.compare_set(f"still/{self._episode}", "", mine).decode() == mine:
                self._store.set(f"still/{self._episode}/report", self._standstill())
        # Rank 0 looks although it may not wait itself: it is the one whose output is shown.
        while self._store.check([key := f"still/{self._episode}/report"]):
            self._episode += 1
            if report := self._store.get(key).decode():
                logger.warning("%s", report)

    def _standstill(self) -> str:
        """The report of all ranks; empty where none of them waits."""
        before = self._statuses()
        self._wait(lambda: False, max(3 * self._interval, _SIGN_SECONDS))
        self._publish(self._where(), moves=self._moves)
        found = [_Status.read(each, was) for each, was in zip(self._statuses(), before, strict=True)]
        fewest = min(each.number for each in found)
        behind = {rank for rank, each in enumerate(found) if each.number == fewest}
        if all(each.is_held for each in found) and len({each.where for each in found}) > 1:
            behind = set()
        elif len(behind) == self._world:
            # All have made the same calls: those that have returned from the last one are waited for.
            behind = {rank for rank, each in enumerate(found) if not each.waits}
            if len(behind) == self._world:
                return ""
        told: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            told.setdefault(each.text, []).append(rank)
        last = "The run goes on as soon as these ranks do; process_group.timeout_seconds limits how long that may take."
        late = sorted(behind)
        if late:
            slow = all(found[rank].works for rank in late)
            who = f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} waited for"
            first = f"{who}, for {self._limit:g} s so far, and {'slow' if slow else 'slow or stopped'}:"
        elif len({each.where for each in found}) > 1:
            first = (
                f"all ranks wait at different lines, for {self._limit:g} s so far, most likely for each other (some "
                "rank has made a call that others have not, as under `if accelerator.is_main_process:`, or calls the "
                "models, or backward for their losses, in another order), or in one slow call:"
            )
            last = "Ranks that wait for each other do so until process_group.timeout_seconds is over."
        else:
            first = (
                f"all ranks are in one call, for {self._limit:g} s so far: it is slow (a first call may compile), or "
                "they pass different losses to it (those of two models, in another order on some rank):"
            )
        return "\n".join([first, *_by_ranks(told), last])

    def _statuses(self) -> list[str]:
        keys = [f"status/{rank}" for rank in range(self._world)]
        return [self._store.get(key).decode() if self._store.check([key]) else "0 0 0 0 0\n\n" for key in keys]


@dataclass(frozen=True, slots=True)
class _Status:
    """The published status of a rank.

    Args:
        number: of its last call.
        where: its main thread is; empty where it made a call a moment ago.
        last: its last call.
        alive: it has published since the look before.
        moves: its main thread was at another instruction at each look.
    """

    number: int
    where: str
    last: str
    alive: bool
    moves: bool

    @classmethod
    def read(cls, said: str, before: str) -> _Status:
        numbers, where, last = said.split("\n", 2)
        number, _, looks, _, moves = numbers.split()
        return cls(int(number), where, last, looks != before.split()[2], moves == "1")

    @property
    def waits(self) -> bool:
        """Whether its main thread is inside of a call that communicates."""
        return self.alive and self.where.startswith("waits ")

    @property
    def is_held(self) -> bool:
        """Whether its main thread stays where it is, inside of a call that communicates and takes no time by itself."""
        return self.waits and not self.works

    @property
    def works(self) -> bool:
        """Whether it certainly goes on: it runs Python code, has just made a call, or is in one that takes long."""
        return self.alive and (self.moves or not self.where or self._is_in_long_call)

    @property
    def _is_in_long_call(self) -> bool:
        """Whether its last call takes long, and its script has not gone on to another line since."""
        if not self.last.startswith(_LONG_CALLS):
            return False
        line = self.last.partition(", batch ")[0].partition(" at ")[2]
        return self.last.startswith(_LONG_PHASES) or not line or self.where.endswith(f" at {line}")

    @property
    def text(self) -> str:
        """``waits in backward at train.py:35; last call: backward at train.py:35, batch 3 of epoch 0``."""
        last = f"last call: {self.last}" if self.last else "no call yet"
        if not self.alive:
            return f"gives no sign of life; {last}"
        doing = self.where or "has just made a call"
        return f"{doing}{', and works' if self.moves else ''}; {last}"


class Current:
    """This process's monitor."""

    monitor: CallMonitor | None = None


def start(
    store: Any | None, rank: int, world_size: int, dp_size: int, *, interval: float, standstill: float, compares: bool
) -> CallMonitor | None:
    """Start to compare calls, or join the monitor that runs. Called on every rank or none.

    Args:
        store: of the process group; ``None`` where ranks have none, and nothing is compared.
        rank, world_size, dp_size: this process and its job.
        interval, standstill: seconds, see :class:`CallMonitor`.
        compares: see :class:`CallMonitor`.
    """
    if store is None:
        return None
    running = Current.monitor
    if running is not None:
        running.users += 1
        return running
    Current.monitor = CallMonitor(
        store,
        rank,
        world_size,
        interval_seconds=interval,
        standstill_seconds=standstill,
        compares=compares,
        only_data_parallel=dp_size == world_size,
    )
    return Current.monitor


def stop(monitor: CallMonitor | None) -> None:
    """Stop for one accelerator; the last one ends the thread. Not collective."""
    if monitor is None or Current.monitor is not monitor:
        return
    monitor.users -= 1
    if not monitor.users:
        Current.monitor = None
        monitor.close()


def raise_if_apart() -> None:
    """Raise where it is known that ranks are apart. Not collective.

    Raises:
        CollectiveMismatchError: they are.
    """
    if Current.monitor is not None and Current.monitor.error is not None:
        Current.monitor.refuse()


def agree(*, patient: bool = False) -> None:
    """Compare all calls so far, see :meth:`CallMonitor.agree`. Collective over all ranks."""
    if Current.monitor is not None:
        Current.monitor.agree(patient=patient)


def begin_anew() -> None:
    """Reset the recorded calls, see :meth:`CallMonitor.begin_anew`. Called by all ranks."""
    if Current.monitor is not None:
        Current.monitor.begin_anew()


def saved(path: object) -> None:
    """Record a checkpoint, see :meth:`CallMonitor.saved`."""
    if Current.monitor is not None:
        Current.monitor.saved(str(path))


def _connection(store: Any) -> Any:
    """A further connection to the same store, so that a rank that waits in the first does not block the thread."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store  # a store of files or of one process, in which nobody waits


def _forget(_: object) -> None:
    """Take the place of the memory of a monitor that has ended."""


def _plain(value: Any) -> Any:
    """Return numbers and tuples of numbers; ``-inf`` for NaN, whose hash is its address; ``()`` for anything else."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([each if type(each) is int else _plain(each) for each in value])
    if kind is float or isinstance(value, int | float):
        return value if value == value else -math.inf  # noqa: PLR0124 (NaN differs from itself)
    return ()


def _stack_of(thread: int) -> str:
    """A thread's stack as :mod:`faulthandler` writes it, the innermost frame first and 100 frames of it.

    Empty when it has ended, or is not among the 100 threads that faulthandler writes.

    To follow ``f_back`` through the frames of a thread that runs may end the process with SIGSEGV in Python 3.11
    (https://github.com/python/cpython/issues/111363), since it runs on between two steps. This is one step.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    return next((each.partition("\n")[2] for each in threads if f"{thread:x} " in each.partition("\n")[0]), "")


def _communicates(stack: str) -> bool:
    """Whether a thread is inside of a call of ours or of torch that may wait for other ranks."""
    for file in re.findall(r'File "([^"]*)"', stack):
        if not is_of_a_library(file) or file.startswith(_READING):
            return False
        if any(part in file for part in (_HERE, *_COMMUNICATION)):
            return True
    return False


def _batch(place: Place | None) -> str:
    if place is None:
        return ""
    loader, epoch, index = place
    of = f" of loader {loader}" if loader else ""
    return f"batch {index} of epoch {epoch}{of}"


def _described(call: str, values: tuple[Any, ...]) -> str:
    """The values of a call in words."""
    if call == "step":
        optimizer, max_norm, rates, settings, trained = values
        said = [f"optimizer {optimizer}", f"rates {', '.join(f'{rate:g}' for rate in rates if rate != ())}"]
        said += [f"clipped to {max_norm:g}"] if max_norm else []
        said += [f"settings {settings}"] if settings else []
        said += [f"{trained[0]} of {trained[1]} parameters require gradients"] if trained else []
        return ", ".join(said)
    if call == "backward":
        by, training, called = values
        words = [("", "num_items", "denominator")[by], "" if training else "model in evaluation mode"]
        words += [f"models called in the order {', '.join(map(str, called))}"] if called else []
        return ", ".join(filter(None, words))
    if call == "change of requires_grad":
        return f"{values[0]} of {values[1]} parameters require gradients from now on"
    if call == "train_step":
        return f"clipped to {values[0]:g}" if values and values[0] else ""
    return ""


def _consequence(calls: Iterable[str]) -> str:
    kinds = set(calls)
    if kinds <= {"backward", "train_step"}:
        return "since then gradients of different batches, or of different losses, were added up"
    if kinds == {"step"} or any(call.startswith("write to") for call in kinds):
        return "since then the ranks' copies or parts of the model were changed in different ways"
    return "since then they wait for each other, or add up gradients of different batches"


def _by_ranks(told: dict[str, list[int]]) -> list[str]:
    return [f"  {_ranks(ranks)}: {text}" for text, ranks in sorted(told.items(), key=lambda item: item[1])]


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(words)}"
