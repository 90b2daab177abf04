"""Which worker failed first, and what the user reads about it.

Workers write records of their exceptions (:mod:`drivetrain.launch.worker`); the agent knows exit codes. Neither is
enough: the agent counts in whole seconds and may notice the second failure first, and a crash leaves no record.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals with which the agent stops the workers that are still running."""


@dataclass(frozen=True)
class Failure:
    """How one worker ended.

    Args:
        rank: global rank.
        exit_code: as :mod:`subprocess` counts, negative for a signal; ``None`` when the agent did not look any more.
        time: seconds since the epoch, from the worker's own record; ``None`` without one.
        message: last line of the exception.
        trace: the whole traceback.
    """

    rank: int
    exit_code: int | None
    time: float | None = None
    message: str = ""
    trace: str = ""

    @property
    def stopped(self) -> bool:
        """Ended by a signal of the agent's, not by itself."""
        return -(self.exit_code or 0) in {getattr(signal, name, None) for name in STOPPING}

    @property
    def shell_code(self) -> int:
        """The code that a shell would show: 128 + n for signal n."""
        if self.exit_code is None:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def __str__(self) -> str:
        if self.time is None and self.exit_code is not None and self.exit_code < 0:
            return f"ended by signal {-self.exit_code} ({_signal_name(-self.exit_code)})"
        code = f"exit code {self.shell_code}"
        return f"{self.message} ({code})" if self.message else code


def read_failures(exit_codes: Mapping[int, int], logs: Path) -> list[Failure]:
    """Return all failures, the one that caused the others first.

    A worker that crashed has no record, and its peers' complaints about a lost connection are younger than its death:
    it goes first. Then the records, by their clock. Workers that were stopped before they could complain go last.

    Args:
        exit_codes: by global rank, as far as the agent knows.
        logs: the folder in which the agent made the workers' folders.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.rglob("error.json"))]
    found: dict[int, Failure] = {}
    for record in records:
        details = record["message"]["extraInfo"]
        rank = int(details["rank"])
        found[rank] = Failure(
            rank=rank,
            exit_code=exit_codes.get(rank),
            time=float(details["precise"]),
            message=record["message"]["message"],
            trace=details["py_callstack"],
        )
    for rank, code in exit_codes.items():
        found.setdefault(rank, Failure(rank, code))

    def order(failure: Failure) -> tuple[int, float, int]:
        kind = 1 if failure.time is not None else 2 if failure.stopped else 0
        return kind, failure.time or 0.0, failure.rank

    return sorted(found.values(), key=order)


def failures_of(error: ChildFailedError, logs: Path) -> list[Failure]:
    """As :func:`read_failures`, from the agent's own error."""
    return read_failures({rank: failure.exitcode for rank, failure in error.failures.items()}, logs)


def explain(failures: list[Failure]) -> str:
    """Return the first failure's traceback and one line for each worker."""
    first, others = failures[0], sorted(failures[1:], key=lambda failure: failure.rank)
    lines = [first.trace.rstrip(), f"rank {first.rank} failed: {first}"]
    lines += [f"rank {it.rank} was stopped" if it.stopped else f"rank {it.rank} failed too: {it}" for it in others]
    return "\n".join(line for line in lines if line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return "unnamed"
