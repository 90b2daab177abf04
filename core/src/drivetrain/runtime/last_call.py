"""The last call that the script made of us: kept where the launcher finds it after this process has died of anything.

Two numbers are written for each call into a mapped file, which the system keeps when a process is killed. What the
numbers stand for is written once for each line of the script that calls us. Nothing is ever flushed or read back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import BinaryIO

from drivetrain.launch.worker import CALL_SITES, CALLS, LAST_CALL, PID, SITE, STOP

_BETWEEN = (str(Path(__file__).parent.parent), str(contextlib.__file__))
"""Files whose frames stand between a call and the script's line: ours, and those of ``with`` blocks."""


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the script that calls us.

    Args:
        number: from 1.
        text: ``gather at eval.py:88``.
        code: keeps the code object alive whose address is part of the key.
    """

    number: int
    text: str
    code: CodeType


class _Record:
    """This process's record; in memory of its own until a launcher's file is there to be used."""

    numbers: memoryview = memoryview(bytearray(8 * (STOP + 1))).cast("Q")
    file: BinaryIO | None = None


_sites: dict[tuple[str, int, int], Site] = {}


def use_launchers_file() -> None:
    """Write to the file that our launcher made for this process, if it did. Called once for each accelerator."""
    folder = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _Record.file is not None or not folder:
        return
    path = Path(folder).with_name(LAST_CALL)
    if not path.exists():
        return
    with path.open("r+b") as file:
        numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    if numbers[PID] != os.getpid():  # of the worker that started this process
        return
    numbers[CALLS], numbers[SITE] = _Record.numbers[CALLS], 0
    _Record.numbers = numbers
    _Record.file = path.with_name(CALL_SITES).open("ab", buffering=0)
    _Record.file.write("".join(f"{site.text}\n" for site in _sites.values()).encode(errors="backslashreplace"))


def note(call: str) -> str:
    """Note that the script calls this; to be the first line of a public method. Not collective.

    Costs about half a microsecond.

    Args:
        call: the method's name, as users know it.

    Returns:
        ``gather at eval.py:88``.
    """
    frame = sys._getframe(2)  # noqa: SLF001 (inspect.currentframe is the same with a detour)
    # Only lines of scripts are in the table, so that a known one is found without looking at names of files.
    while (site := _sites.get((call, id(frame.f_code), frame.f_lasti))) is None:
        if frame.f_back is None or not frame.f_code.co_filename.startswith(_BETWEEN):
            site = _new_site(call, frame)
            break
        frame = frame.f_back
    numbers = _Record.numbers
    numbers[CALLS] += 1
    numbers[SITE] = site.number
    return site.text


def _new_site(call: str, frame: FrameType) -> Site:
    code = frame.f_code
    site = Site(len(_sites) + 1, f"{call} at {Path(code.co_filename).name}:{frame.f_lineno}", code)
    _sites[call, id(code), frame.f_lasti] = site
    if _Record.file is not None:
        _Record.file.write(f"{site.text}\n".encode(errors="backslashreplace"))  # a file may be named in any bytes
    return site


def set_stop(value: int) -> None:
    """Tell the launcher what a request to stop does to this process, see :data:`drivetrain.launch.worker.STOP`."""
    _Record.numbers[STOP] = value
