"""Claims folders of the file system for one process, so that two runs never save in one.

No torch, and nothing is collective. The process that writes owns the target, or the folder in which it numbers its
checkpoints: a file there names it (:class:`Owner`) and is renewed while it lives. A remote folder has no owner.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from drivetrain.errors import CheckpointError

logger = logging.getLogger(__name__)

OWNER = ".owner.json"
"""Name of the file inside the folder that is owned; ``.<folder>.owner.json`` where it lies beside the folder."""

BEAT_SECONDS = 10.0
"""Interval in seconds at which an owner renews its files."""

DEAD_SECONDS = 60.0
"""An owner on another machine that has not renewed its file for so long is dead; six beats may be late together."""

_MOST_HELD = 16
"""A script that saves each checkpoint into another folder holds the newest so many; each costs one call a beat."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Content of an owner file.

    Args:
        machine: identifies host, boot and container, within which process ids are comparable.
        pid: process id.
        started: when that process started, as reported by the system; empty where unknown.
        folder: the folder's path there; a copy of the folder elsewhere has no owner.
    """

    machine: str
    pid: int
    started: str
    folder: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition('/')[0]}"


_held: dict[Path, Path] = {}
"""The owner file of each folder that this process holds, the one claimed last at the end."""
_lock = threading.Lock()
_changed = threading.Event()
_thread: threading.Thread | None = None


def claim(folder: Path, *, beside: bool = False) -> None:
    """Claim an existing folder, or check that this process still owns it. Not collective: for the main process.

    A claim on a folder that a process of another machine may own waits until it is known whether that process is alive.

    Args:
        folder: it, and everything directly in it, is written by this process alone from now on.
        beside: put the file beside the folder, whose content scripts list.

    Raises:
        CheckpointError: another living process holds it; nothing was changed.
    """
    folder = _real(folder)
    path, other = _files(folder)[:: -1 if beside else 1]
    _refuse(other, folder)
    while True:
        found = _read(path)
        if found == _here(folder) or (found is None and _create(path, folder)):
            _hold(folder, path)
            return
        if found is not None:
            if _lives(found, path, folder):
                _held.pop(folder, None)
                raise _taken(found, folder)
            _clear(path, found)


def check(folder: Path) -> None:
    """Raise unless this process still owns the folder that it claimed. Nothing is changed.

    Raises:
        CheckpointError: another process considered this one dead and took the folder over.
    """
    folder = _real(folder)
    found = _read(_held.get(folder, folder / OWNER))
    if found != _here(folder):
        _held.pop(folder, None)
        raise _taken(found, folder)


def holds(folder: Path) -> bool:
    """Whether this process has claimed the folder."""
    return _real(folder) in _held


def refuse_if_held(folder: Path) -> None:
    """Raise :class:`CheckpointError` when a living process other than this one holds the folder."""
    folder = _real(folder)
    for path in _files(folder):
        _refuse(path, folder)


def release() -> None:
    """Release every folder that this process owns. Not collective; may be called twice."""
    with _lock:
        for folder in list(_held):
            _let_go(folder)
    _changed.set()


def claim_new(staging: Path, folder: Path) -> None:
    """Put the owner file of a folder that does not exist yet into the folder that will be renamed to it."""
    _create(staging / OWNER, _real(folder))


def is_alive(pid: int, started: str = "") -> bool:
    """Whether a process of this machine is alive; ``started`` distinguishes it from a later one with the same id."""
    state = _state(pid)
    if state is not None:
        return state[0] not in "ZX" and started in ("", state[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def machine() -> str:
    """Identifier of this machine, its boot and this container."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    since = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    container = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()}/{since}/{container}"


def _state(pid: int) -> tuple[str, str] | None:
    """State and start time of a process; ``None`` where it is gone or the system has no such file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # Before it stands the program's name, which may hold anything.
    return fields[0], fields[19]


def _real(folder: Path) -> Path:
    return Path(os.path.realpath(folder))


def _files(folder: Path) -> tuple[Path, Path]:
    """Paths of a folder's possible owner files: inside and beside it."""
    return folder / OWNER, folder.parent / f".{folder.name}{OWNER}"


def _refuse(path: Path, folder: Path) -> None:
    found = _read(path)
    if found not in (None, _here(folder)) and _lives(found, path, folder):
        raise _taken(found, folder)


def _here(folder: Path) -> Owner:
    state = _state(os.getpid())
    return Owner(machine(), os.getpid(), "" if state is None else state[1], str(folder))


def _read(path: Path) -> Owner | None:
    """The owner named in the file; ``None`` when there is no file. One that is being written names no owner."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
        return Owner(str(found["machine"]), int(found["pid"]), str(found["started"]), str(found["folder"]))
    except (ValueError, KeyError, TypeError):
        return Owner("a host that is not known", 0, "", "")


def _create(path: Path, folder: Path) -> bool:
    """Write this process's name; ``False`` when there is a file already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(_here(folder))) + "\n")
    except FileExistsError:
        return False
    return True


def _lives(found: Owner, path: Path, folder: Path) -> bool:
    if found.machine != machine():
        return _beats(path, found)
    # A copied owner file does not apply to the copy.
    there = Path(found.folder)
    return there.exists() and there.samefile(folder) and is_alive(found.pid, found.started)


def _beats(path: Path, found: Owner) -> bool:
    """Whether the file is renewed, by the clock of the file system; waits until that is known."""
    probe = path.with_name(f".owner-{secrets.token_hex(8)}")
    seen = _modified(path)
    try:
        probe.touch(exist_ok=False)
        left = DEAD_SECONDS - (_modified(probe) - seen)
    finally:
        probe.unlink(missing_ok=True)
    if left > 0:
        logger.warning("%s names %s; waiting up to %.0f s to see whether that is alive.", path, found, left)
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_SECONDS / 10, left))
        if _modified(path) != seen:
            return True
    return False


def _modified(path: Path) -> float:
    """Modification time of a file, from the file server: opening the file invalidates this machine's cache."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0


def _clear(path: Path, dead: Owner) -> None:
    """Remove a dead owner's file. Where another process is doing the same, the faster one's new file stays."""
    aside = path.with_name(f".owner-{secrets.token_hex(8)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) in (None, dead):
        aside.unlink(missing_ok=True)
    else:
        aside.rename(path)


def _hold(folder: Path, path: Path) -> None:
    global _thread  # noqa: PLW0603 (one thread renews the files of the process)
    with _lock:
        _held.pop(folder, None)
        _held[folder] = path
        while len(_held) > _MOST_HELD:
            _let_go(next(iter(_held)))
        if _thread is None:
            _thread = threading.Thread(target=_renew, name="drivetrain-owner", daemon=True)
            _thread.start()
    _changed.set()


def _let_go(folder: Path) -> None:
    path = _held.pop(folder)
    if _read(path) == _here(folder):
        path.unlink(missing_ok=True)


def _renew() -> None:
    """Renew the files of all folders held, until there are none."""
    global _thread  # noqa: PLW0603 (as above)
    while True:
        _changed.wait(BEAT_SECONDS)
        _changed.clear()
        with _lock:
            if not _held:
                _thread = None
                return
            for path in _held.values():
                # The next save reports a folder that was removed or a file system that is unavailable.
                with contextlib.suppress(OSError):
                    os.utime(path)


def _taken(found: Owner | None, folder: Path) -> CheckpointError:
    if found is None:
        return CheckpointError(
            f"{folder} is no longer held by this process: its file {OWNER} is gone",
            cure="Save again; do not remove that file while a run saves there.",
        )
    return CheckpointError(
        f"{folder} belongs to {found}, which is alive: two runs would overwrite each other's checkpoints",
        cure="Stop that process, let it call accelerator.end_training(), or save into another folder.",
    )


def _forked() -> None:
    """Reset in a forked child, which owns no folder and has none of its parent's threads."""
    global _thread, _lock, _changed
    _held.clear()
    _thread, _lock, _changed = None, threading.Lock(), threading.Event()


os.register_at_fork(after_in_child=_forked)
atexit.register(release)
