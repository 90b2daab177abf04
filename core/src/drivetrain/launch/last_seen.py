"""Where each worker was: read from what it left behind, for the report of a failure. No torch."""

from __future__ import annotations

import re
import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from drivetrain.launch import worker

_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NUMBERS = struct.Struct("5Q")
_THREAD = re.compile(r"hread (0x[0-9a-f]+)[^\n]*\(most recent call first\):\n((?:  .*\n?)*)")
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)')
_DECORATORS = frozenset({"wrapper", "decorate_context", "_wrapped_call_impl"})
"""Functions of torch's that stand between a call and what was called."""


@dataclass(frozen=True)
class LastSeen:
    """What one worker left behind.

    Args:
        rank: global rank.
        pid: its process, which is the leader of a process group.
        calls: how many calls of ours its script had made.
        call: the last of them, ``gather at eval.py:88``; empty when there was none.
        stack: the main thread's stack when a signal found it, most recent call first; empty when none did.
        stop: what a request to stop does or did, see :data:`drivetrain.launch.worker.STOP`.
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
    """All workers of one start that left something, by global rank.

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


def place(trace: str, *, newest_first: bool = False) -> str:
    """The script's line, and what it called there: ``in gather at eval.py:88``; empty where no script is in it.

    The line is that of whoever called us; where nobody did, the innermost one that belongs to no library.

    Args:
        trace: as Python or, ``newest_first``, as ``faulthandler`` writes it.
        newest_first: the innermost frame stands first.
    """
    frames = _FRAME.findall(trace)[:: -1 if newest_first else 1]
    users = [index for index, (file, _, _) in enumerate(frames) if _is_users(file)]
    if not users:
        return ""
    entered = (index for index in range(users[0], len(frames)) if frames[index][0].startswith(_OURS))
    at = next(entered, users[-1] + 1) - 1
    file, line, _ = frames[at]
    called = next((name for _, _, name in frames[at + 1 :] if name not in _DECORATORS), "")
    return f"{f'in {called} ' if called else ''}at {Path(file).name}:{line}"


def _is_users(file: str) -> bool:
    return not (file.startswith((_OURS, "<", *_LIBRARIES)) or "/drivetrain_" in file)


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
