"""Which worker failed first, where each of the others was, and what the user reads about it.

Workers write records of their exceptions (:mod:`drivetrain.launch.worker`); the agent knows exit codes. Neither is
enough: the agent counts in whole seconds and may notice the second failure first, and a crash leaves no record. What a
worker was doing is read from what it left behind (:mod:`drivetrain.launch.last_seen`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.errors import cut
from drivetrain.launch.last_seen import LastSeen, place, read_workers

STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals with which the agent stops the workers that are still running."""


_LONGEST_MESSAGE = 500
"""Characters of a message in the line about its rank; the traceback above it has more."""

_LONGEST_LINE = 2_000
_MOST_LINES = 400
"""Of a traceback on the terminal. Python writes 3 lines for a frame, and repeated ones once; the file has all."""


@dataclass(frozen=True)
class Failure:
    """How one worker ended.

    Args:
        rank: global rank.
        exit_code: as :mod:`subprocess` counts, negative for a signal; ``None`` when it was stopped, or nobody looked.
            A worker that was stopped while it was ending by itself has the code with which it would have ended.
        time: seconds since the epoch, from the worker's own record; ``None`` without one.
        message: last line of the exception.
        trace: the whole traceback.
        seen: where it was; ``None`` where nothing of it is left.
    """

    rank: int
    exit_code: int | None
    time: float | None = None
    message: str = ""
    trace: str = ""
    seen: LastSeen | None = None

    @property
    def stopped(self) -> bool:
        """Ended by the launcher, not by itself."""
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
        """Host, place and last call, in brackets."""
        if self.seen is None:
            return ""
        # What it was doing while it ended because of an exception is of no interest.
        where = place(self.trace) if self.trace else place(self.seen.stack, newest_first=True)
        return f" [{'; '.join(filter(None, (f'host {socket.gethostname()}', where, self.seen.last)))}]"


def read_failures(exit_codes: Mapping[int, int | None], logs: Path) -> list[Failure]:
    """Return all failures, the one that caused the others first.

    A worker that crashed has no record, and its peers' complaints about a lost connection are younger than its death:
    it goes first. Then the records, by their clock. Workers that were stopped before they could complain go last.

    Args:
        exit_codes: by global rank, of those that did not end well; ``None`` for those that were stopped.
        logs: the folder in which the agent made the workers' folders.
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
        )
    for rank, code in exit_codes.items():
        found.setdefault(rank, Failure(rank, code, seen=seen.get(rank)))

    def order(failure: Failure) -> tuple[int, float, int]:
        kind = 1 if failure.time is not None else 2 if failure.stopped else 0
        return kind, failure.time or 0.0, failure.rank

    return sorted(found.values(), key=order)


def failures_of(exit_codes: Mapping[int, int | None], logs: Path) -> list[Failure]:
    """As :func:`read_failures`; ranks that had ended well by then stand last."""
    failures = read_failures(exit_codes, logs)
    failed = {failure.rank for failure in failures}
    # Torch's agent forgets forked workers that it has stopped; they have left a stack.
    others = {rank: seen for rank, seen in read_workers(logs).items() if rank not in failed}
    ended = [Failure(rank, None if seen.stack else 0, seen=seen) for rank, seen in others.items()]
    return failures + ended


def explain(failures: list[Failure], *, whole: bool = False) -> str:
    """Return the first failure's traceback and one line for each worker.

    Args:
        failures: as :func:`read_failures` orders them.
        whole: do not shorten a traceback with lines, or with so many of them, that nobody can read on a terminal.
    """
    first, others = failures[0], sorted(failures[1:], key=lambda failure: failure.rank)
    trace = first.trace.rstrip()
    lines = [trace if whole else _shortened(trace), f"rank {first.rank} failed: {first}{first.remark}"]
    lines += [f"rank {it.rank} {_fate(it, first)}{it.remark}" for it in others]
    return "\n".join(line for line in (*lines, _behind(failures)) if line)


def where_they_were(logs: Path) -> str:
    """A line for each worker of this machine that was stopped for the sake of another machine."""
    stopped = (Failure(rank, None, seen=seen) for rank, seen in sorted(read_workers(logs).items()))
    return "".join(f"rank {it.rank} was stopped{it.remark}\n" for it in stopped)


def _printable(text: str) -> str:
    """The text as any UTF-8 file and stream takes it: a message may hold halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shortened(trace: str) -> str:
    lines = [cut(line, _LONGEST_LINE) for line in trace.splitlines()]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines[half:-half] = [f"... ({len(lines) - 2 * half:,} lines are left out here)"]
    return "\n".join(lines)


def _killed(exit_code: int, seen: LastSeen | None) -> bool:
    """Torch's agent kills what does not heed its first signal, for which a stack was written."""
    return exit_code == -signal.SIGKILL and seen is not None and bool(seen.stack)


def _behind(failures: list[Failure]) -> str:
    """Who the others waited for, where it is not the one that failed first."""
    calls = {it.rank: it.seen.calls for it in failures if it.seen is not None}
    late = [rank for rank, number in calls.items() if number < max(calls.values())]
    if not late or failures[0].rank in late:
        return ""
    return f"The others waited: rank {', '.join(map(str, sorted(late)))} made fewer calls."


def _fate(failure: Failure, first: Failure) -> str:
    if failure.message and failure.message == first.message:
        return "failed too, for the same reason"
    if failure.stopped and failure.time is None:
        return "was stopped"
    return "had ended" if failure.exit_code == 0 else f"failed too: {failure}"


def file_report(failures: list[Failure], folder: str | None) -> Path | None:
    """Write what :func:`explain` says, and every stack, into a file that outlives the run.

    Args:
        failures: of all workers of this machine.
        folder: where to; ``None`` = the system's folder for temporary files.

    Returns:
        Its path; ``None`` when it cannot be written, which must not hide the failure itself.
    """
    stacks = [f"rank {it.rank}, most recent call first:\n{it.seen.stack}" for it in failures if it.seen is not None]
    name = f"drivetrain-failure-{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}.txt"
    path = Path(folder or tempfile.gettempdir()) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join([explain(failures, whole=True), *stacks]) + "\n", encoding="utf-8")
    except OSError:
        return None
    return path


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return "unnamed"
