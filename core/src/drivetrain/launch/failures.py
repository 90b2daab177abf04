"""Determines which worker failed first and the state of the others, and reports it.

Workers write records of their exceptions (:mod:`drivetrain.launch.worker`); the launcher knows exit codes. Neither is
enough: the launcher may notice the second failure first, and a crash leaves no record. What a worker was doing is read
from the files that it leaves behind. No torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import sysconfig
import tempfile
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.launch import worker
from drivetrain.wording import cut, likely_cause

_OURS = str(Path(__file__).parent.parent)
_NOTEBOOK = str(Path(__file__).with_name("notebook.py"))
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NUMBERS = struct.Struct("5Q")
_THREAD = re.compile(r"hread (0x[0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  .*\n?)*)")
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)')
_DECORATORS = frozenset({"wrapper", "decorate_context", "_wrapped_call_impl"})
"""Functions of torch that appear in tracebacks between caller and callee."""

_LONGEST_MESSAGE = 500
"""Characters of a message in the line about its rank; the traceback above it has more."""

_LONGEST_LINE = 2_000
_MOST_LINES = 400
"""Maximum lines of a traceback on the terminal. Python writes 3 lines per frame, repeats once; the file has all."""


@dataclass(frozen=True)
class LastSeen:
    """The last known state of one worker.

    Args:
        rank: global rank.
        pid: its process, which is the leader of a process group.
        calls: how many calls of ours its script had made.
        call: the last of them, ``gather at eval.py:88``; empty when there was none.
        stack: the main thread's stack at a signal, most recent call first; empty without one.
        stop: how it handles a request to stop, see :data:`drivetrain.launch.worker.STOP`.
    """

    rank: int
    pid: int
    calls: int = 0
    call: str = ""
    stack: str = ""
    stop: int = 0

    @property
    def last(self) -> str:
        """``last call: gather at eval.py:88, its 12th``; empty when there was none."""
        return f"last call: {self.call}, its {_ordinal(self.calls)}" if self.call else ""


def read_workers(records: Path) -> dict[int, LastSeen]:
    """The last known state of all workers of one start, by global rank.

    Args:
        records: the folder that holds a folder for each of them.
    """
    found = (_read(path) for path in sorted(records.glob(f"*/{worker.LAST_CALL}")))
    return {seen.rank: seen for seen in found if seen is not None}


def _read(path: Path) -> LastSeen | None:
    numbers = path.read_bytes()
    if len(numbers) < _NUMBERS.size:  # it is being written at this moment
        return None
    pid, rank, calls, site, stop = _NUMBERS.unpack(numbers)
    sites = _text(path.with_name(worker.CALL_SITES)).splitlines()
    call = sites[site - 1] if 0 < site <= len(sites) else ""
    stack = _main_stack(_text(path.with_name(worker.STACKS)))
    return LastSeen(rank, pid, calls, call, stack, stop)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _main_stack(text: str) -> str:
    """The newest dump of the main thread, whose number is the first line."""
    main, _, dumps = text.partition("\n")
    stacks = [frames for thread, frames in _THREAD.findall(dumps) if int(thread, 16) == int(main, 16)]
    return stacks[-1].rstrip() if stacks else ""


def script_line(trace: str, *, newest_first: bool = False) -> str:
    """The script's line, and what it called there: ``in gather at eval.py:88``; empty where no script is in it.

    The line is that of the call of this library, else the innermost one outside of libraries.

    Args:
        trace: as Python or, ``newest_first``, as ``faulthandler`` writes it.
        newest_first: the innermost frame stands first.
    """
    frames = _FRAME.findall(trace)[:: -1 if newest_first else 1]
    forked = [index for index, (file, _, name) in enumerate(frames) if name == "_work" and file == _NOTEBOOK]
    frames = frames[forked[-1] + 1 :] if forked else frames  # frames before it belong to the forking process
    users = [index for index, (file, _, _) in enumerate(frames) if not is_of_a_library(file)]
    if not users:
        return ""
    entered = next((index for index in range(users[0], len(frames)) if frames[index][0].startswith(_OURS)), len(frames))
    at = max(index for index in users if index < entered)
    file, line, _ = frames[at]
    inner = frames[at + 1 :]
    called = next((name for _, _, name in inner if name not in _DECORATORS), "")
    called = "import" if inner and inner[0][0].startswith("<frozen importlib") else called
    return f"{f'in {called} ' if called else ''}at {Path(file).name}:{line}"


def is_of_a_library(file: str) -> bool:
    """Whether a file of source text is ours or an installed library's, not the script's."""
    return file.startswith((_OURS, "<", *_LIBRARIES)) or "/src/drivetrain_" in file


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True)
class Failure:
    """End of one worker.

    Args:
        rank: global rank.
        exit_code: as in :mod:`subprocess`, negative for a signal; ``None`` when it was stopped, or is unknown.
            A worker that was stopped while it was ending by itself has the code with which it would have ended.
        time: seconds since the epoch, from the worker's own record; ``None`` without one.
        message: last line of the exception.
        trace: the whole traceback.
        seen: its last known state; ``None`` without one.
        out_of_memory: it ended with ``torch.OutOfMemoryError``, or with an error raised from one.
        ours: the traceback as it is shown of an error of this library, whose sentences are the whole explanation: to
            the script's line. Empty for another error.
        chained: that one was raised from an error of the script, or while it was handled.
    """

    rank: int
    exit_code: int | None
    time: float | None = None
    message: str = ""
    trace: str = ""
    seen: LastSeen | None = None
    out_of_memory: bool = False
    ours: str = ""
    chained: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the launcher stopped it."""
        return self.exit_code is None or _killed(self.exit_code, self.seen)

    @property
    def shell_code(self) -> int:
        """The code that a shell would show: 128 + n for signal n."""
        if self.exit_code is None:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def __str__(self) -> str:
        if not self.message and self.exit_code is not None and self.exit_code < 0:
            return f"ended by signal {-self.exit_code} ({_signal_name(-self.exit_code)})"
        message = cut(self.message.partition("\n")[0], _LONGEST_MESSAGE)
        code = f"exit code {self.shell_code}"
        return f"{message} ({code})" if message else code

    @property
    def remark(self) -> str:
        """Host, line and last call, in brackets."""
        if self.seen is None:
            return ""
        # What it did while it ended because of an exception is irrelevant.
        where = script_line(self.trace) if self.trace else script_line(self.seen.stack, newest_first=True)
        return f" [{'; '.join(filter(None, (f'host {socket.gethostname()}', where, self.seen.last)))}]"


def read_failures(exit_codes: Mapping[int, int | None], logs: Path) -> list[Failure]:
    """Return all failures, the one that caused the others first; empty when there was none.

    A worker that crashed has no record, and its peers' errors about a lost connection come after its end: it goes
    first. Then the records, by their clock, then workers that were stopped before they could write one. Workers
    that had ended well by then come last. Of ranks with one reason, one with an error of the script goes first.

    Args:
        exit_codes: by global rank, of those that did not end well; ``None`` for those that were stopped.
        logs: the folder that holds a folder for each worker.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.rglob("error.json"))]
    seen = read_workers(logs)
    found: dict[int, Failure] = {}
    for record in records:
        details = record["message"]["extraInfo"]
        rank = int(details["rank"])
        code = exit_codes.get(rank)
        found[rank] = Failure(
            rank=rank,
            exit_code=int(details["exit_code"]) if code is None or _killed(code, seen.get(rank)) else code,
            time=float(details["precise"]),
            message=_printable(record["message"]["message"]),
            trace=_printable(details["py_callstack"]),
            seen=seen.get(rank),
            # Torch's own agent writes no such key.
            out_of_memory=details.get("out_of_memory") is True,
            ours=_printable(details.get("ours", "")),
            chained=details.get("chained") is True,
        )
    for rank, code in exit_codes.items():
        found.setdefault(rank, Failure(rank, code, seen=seen.get(rank)))

    def order(failure: Failure) -> tuple[int, float, int]:
        kind = 1 if failure.time is not None else 2 if failure.stopped else 0
        return kind, failure.time or 0.0, failure.rank

    ended = [Failure(rank, 0, seen=it) for rank, it in seen.items() if rank not in found] if found else []
    ordered = sorted(found.values(), key=order)
    reason = ordered[0].message if ordered else ""
    return sorted(ordered, key=lambda failure: not (failure.chained and failure.message == reason)) + ended


def explain(failures: list[Failure], *, whole: bool = False) -> str:
    """Return the first failure's traceback and one line for each worker.

    Args:
        failures: as :func:`read_failures` orders them.
        whole: do not shorten a traceback with lines, or with so many of them, that they cannot be read on a terminal.
    """
    first, others = failures[0], sorted(failures[1:], key=lambda failure: failure.rank)
    cause = _cause(failures)
    # It is a note of the exception, too, where the failing call knew it.
    noted = (first.ours or first.trace).replace(likely_cause(first.message), "").rstrip()
    trace = first.trace.rstrip() if whole else _shortened(noted)
    # The sentences of our errors are long, and stand above already.
    how = f"{first.message.partition(':')[0].rpartition('.')[2]} (exit code {first.shell_code})"
    lines = [trace]
    lines += [f"rank {first.rank} failed: {how if first.ours and trace else first}{first.remark}"]
    lines += [f"rank {it.rank} {_ending(it, first)}{it.remark}" for it in others]
    return "\n".join(line for line in (*lines, _behind(failures), cause) if line)


def where_they_were(logs: Path, ranks: Container[int] | None = None) -> str:
    """A line for each worker of this machine that was stopped on request, or because of another machine.

    Args:
        logs: as for :func:`read_failures`.
        ranks: of workers that were stopped; ``None`` for all.
    """
    seen = sorted(read_workers(logs).items())
    stopped = (Failure(rank, None, seen=each) for rank, each in seen if ranks is None or rank in ranks)
    return "".join(f"rank {it.rank} was stopped{it.remark}\n" for it in stopped)


def _printable(text: str) -> str:
    """The text in valid UTF-8: a message may hold halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shortened(trace: str) -> str:
    lines = [cut(line, _LONGEST_LINE) for line in trace.splitlines()]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines[half:-half] = [f"... ({len(lines) - 2 * half:,} lines are left out here)"]
    return "\n".join(lines)


def _killed(exit_code: int, seen: LastSeen | None) -> bool:
    """Whether the launcher killed it: it ignored the first signal, at which its stack was written."""
    return exit_code == -signal.SIGKILL and seen is not None and bool(seen.stack)


_HINTS = {
    "not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver": "There is no such device here. "
    "Leave .to('cuda') and .cuda() out: prepare brings models and batches to accelerator.device.",
    "is not on the expected device|Expected all tensors to be on the same device": "Prepared models and batches of "
    "prepared loaders are on accelerator.device. Make other tensors there: torch.zeros(n, device=accelerator.device).",
    "Can't pickle|Can't get local object|cannot pickle": "Workers of a loader that are spawned get the data set as a "
    "pickle. Define its classes and functions at the top of a module, without lambdas, or leave "
    "multiprocessing_context='spawn' out.",
}
"""Maps errors of Python and torch that often end a training to what to do about them."""


def _cause(failures: list[Failure]) -> str:
    """Describe the probable cause, unless the first rank ended by an error of this library, which explains itself."""
    first = failures[0]
    if first.exit_code == -signal.SIGKILL and not first.message:
        return (
            "Signal 9 comes from the system, most often, when host memory is short (`dmesg` says so): fewer workers of "
            "loaders, or smaller batches, need less."
        )
    hint = next((hint for pattern, hint in _HINTS.items() if re.search(pattern, first.message)), "")
    if hint:
        return hint
    # It aborts where sizes differ, and writes the reason to the terminal alone; NCCL's own watchdog does likewise.
    aborted = not first.message and first.exit_code == -signal.SIGABRT
    guessed = likely_cause("a collective operation failed" if aborted else first.message)
    ended = [str(it.rank) for it in failures if it.exit_code == 0]
    if not guessed or not ended:
        return guessed
    who = f"Rank {ended[0]}" if len(ended) == 1 else f"Ranks {', '.join(ended)}"
    return (
        f"{who} had ended without an error while rank {first.rank} still trained. Every rank must make as many steps "
        "as the others: look for a `sys.exit`, `return` or `break` that not all of them reach."
    )


def _behind(failures: list[Failure]) -> str:
    """Return the rank that the other ranks waited for, unless it failed first."""
    calls = {it.rank: it.seen.calls for it in failures if it.seen is not None}
    late = [rank for rank, number in calls.items() if number < max(calls.values())]
    if not late or failures[0].rank in late:
        return ""
    return f"The others waited: rank {', '.join(map(str, sorted(late)))} made fewer calls."


_LOST = re.compile("connection (closed|reset|refused)|broken pipe|socket .*(closed|reset)", re.IGNORECASE)
"""Matches messages of communication libraries on ranks that have lost a peer."""


def _ending(failure: Failure, first: Failure) -> str:
    if failure.message and failure.message == first.message:
        return "failed too, for the same reason"
    if _LOST.search(failure.message):
        return f"lost its connection to rank {first.rank}"
    if failure.stopped and failure.time is None:
        return "was stopped"
    return "had ended" if failure.exit_code == 0 else f"failed too: {failure}"


def file_report(failures: list[Failure], folder: str | None) -> str:
    """Write the text of :func:`explain`, and the stacks that there are, to a file that is kept after the run.

    Args:
        failures: of all workers of this machine.
        folder: where to. ``None``: the system's folder for temporary files, and only when the file says more than was
            shown.

    Returns:
        A line that names it; empty without a file, also when it cannot be written, which must not hide the failure
        itself.
    """
    # A process that Python is leaving has a stack without a frame.
    seen = [it.seen for it in failures if it.seen is not None and _FRAME.search(it.seen.stack)]
    trace = failures[0].trace.rstrip()
    if folder is None and not seen and _shortened(trace) == trace:
        return ""
    stacks = [f"rank {it.rank}, most recent call first:\n{it.stack}" for it in seen]
    name = f"drivetrain-failure-{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}.txt"
    path = Path(folder or tempfile.gettempdir()) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join([explain(failures, whole=True), *stacks]) + "\n", encoding="utf-8")
    except OSError:
        return ""
    ranks = ", ".join(str(it.rank) for it in seen)
    of_ranks = f"With the stack{'s' if len(seen) > 1 else ''} of rank {ranks}" if seen else "The report"
    return f"{of_ranks}: {path}\n"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return "unnamed"
