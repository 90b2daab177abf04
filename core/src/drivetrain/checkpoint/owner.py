"""Lock a checkpoint folder, so that one process at a time writes to it. No torch.

A hidden file names the process by machine, process id and start time, and its modification time is renewed while the
process holds the folder. Another process may take the folder over once that one is dead. On the same machine the system
says whether it is; on another machine it is dead when it has not renewed the file for :data:`DEAD_SECONDS`. A process
that was taken for dead finds another's name when it next writes, and raises.

The main process writes for its job, so the ranks of one job never meet here.
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
"""How often an owner renews its files."""

DEAD_SECONDS = 60.0
"""An owner on another machine that has not renewed its file for so long is dead; six beats may be late together."""

_MOST_HELD = 16
"""A script that saves each checkpoint into another folder holds the newest so many; each costs one call a beat."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner file says.

    Args:
        host: host name, for people.
        machine: tells apart host, start of its system and container: who may judge by process id.
        pid: process id.
        started: when that process started, as the system counts; empty where it does not say.
        folder: the folder's path there; a copy of the folder elsewhere has no owner.
        token: of this claim.
    """

    host: str
    machine: str
    pid: int
    started: str
    folder: str
    token: str


_held: dict[Path, tuple[str, Path]] = {}
"""Token and file of each folder that this process holds, the one written last at the end."""
_lock = threading.RLock()
_wake = threading.Event()
_thread: threading.Thread | None = None


def claim(folder: Path, *, beside: bool = False) -> None:
    """Hold an existing folder, or make sure that this process still does. Not collective: for the main process.

    A claim on a folder that a process of another machine may hold waits until it is known whether that is alive.

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
        if found is None:
            owner = _here(folder)
            if _create(path, owner):
                _hold(folder, owner.token, path)
                return
        elif _is_this_process(found, folder):
            _hold(folder, found.token, path)
            return
        elif _lives(found, path, folder):
            _held.pop(folder, None)
            raise _taken(found, folder)
        else:
            _clear(path, found)


def check(folder: Path) -> None:
    """Raise unless this process still holds the folder that it claimed. Nothing is changed.

    Raises:
        CheckpointError: another process took it over, taking this one for dead.
    """
    folder = _real(folder)
    token, path = _held.get(folder, ("", folder / OWNER))
    found = _read(path)
    if found is None or found.token != token:
        _held.pop(folder, None)
        raise _taken(found, folder)


def holds(folder: Path) -> bool:
    """Whether this process has claimed the folder."""
    return _real(folder) in _held


def claim_new(staging: Path, target: Path) -> None:
    """Put an owner file into a folder that is going to be renamed to ``target``; then call :func:`claim`."""
    _create(staging / OWNER, _here(_real(target)))


def refuse_if_held(folder: Path) -> None:
    """Raise :class:`CheckpointError` when a living process other than this one holds the folder."""
    folder = _real(folder)
    for path in _files(folder):
        _refuse(path, folder)


def release() -> None:
    """Let go of every folder that this process holds. Not collective; may be called twice."""
    with _lock:
        for folder in list(_held):
            _let_go(folder)
    _wake.set()


def is_alive(pid: int, started: str = "") -> bool:
    """Whether a process of this machine lives; ``started`` tells it from a later one with the same number."""
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
    """This machine since it was started, and on it this container."""
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
    """Where a folder's owner may be named: inside and beside it."""
    return folder / OWNER, folder.parent / f".{folder.name}{OWNER}"


def _refuse(path: Path, folder: Path) -> None:
    found = _read(path)
    if found is not None and not _is_this_process(found, folder) and _lives(found, path, folder):
        raise _taken(found, folder)


def _here(folder: Path) -> Owner:
    state = _state(os.getpid())
    started = "" if state is None else state[1]
    return Owner(socket.gethostname(), machine(), os.getpid(), started, str(folder), secrets.token_hex(8))


def _read(path: Path) -> Owner | None:
    """What the file says; ``None`` when there is none. One that is being written names nobody."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
        names = {name: str(found[name]) for name in ("host", "machine", "started", "folder", "token")}
        return Owner(pid=int(found["pid"]), **names)
    except (ValueError, KeyError, TypeError):
        return Owner("a host that is not known", "", 0, "", "", "")


def _create(path: Path, owner: Owner) -> bool:
    """Write this process's name; ``False`` when there is a file already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(owner)) + "\n")
    except FileExistsError:
        return False
    return True


def _is_this_process(found: Owner, folder: Path) -> bool:
    if folder in _held and found.token == _held[folder][0]:
        return True
    here = _here(folder)
    names = ("machine", "pid", "started", "folder")
    return all(getattr(found, name) == getattr(here, name) for name in names)


def _lives(found: Owner, path: Path, folder: Path) -> bool:
    if found.machine != machine():
        return _beats(path, found)
    # What was copied with a folder says nothing about the copy.
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
        logger.warning("%s names %s; waiting up to %.0f s to see whether that is alive.", path, _name(found), left)
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_SECONDS / 10, left))
        if _modified(path) != seen:
            return True
    return False


def _modified(path: Path) -> float:
    """Time of a file's last change, asked of the server: opening it drops what this machine remembers of it."""
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
    moved = _read(aside)
    if moved is not None and moved.token != dead.token:
        aside.rename(path)
    else:
        aside.unlink(missing_ok=True)


def _hold(folder: Path, token: str, path: Path) -> None:
    global _thread  # noqa: PLW0603 (one thread renews the files of the process)
    with _lock:
        _held.pop(folder, None)
        _held[folder] = token, path
        while len(_held) > _MOST_HELD:
            _let_go(next(iter(_held)))
        if _thread is None:
            _wake.clear()
            _thread = threading.Thread(target=_renew, name="drivetrain-owner", daemon=True)
            _thread.start()


def _let_go(folder: Path) -> None:
    token, path = _held.pop(folder)
    found = _read(path)
    if found is not None and found.token == token:
        path.unlink(missing_ok=True)


def _renew() -> None:
    """Renew the files of all folders held, until there are none."""
    global _thread  # noqa: PLW0603 (as above)
    while True:
        released = _wake.wait(BEAT_SECONDS)
        with _lock:
            _wake.clear()
            if not _held:
                _thread = None
                return
            for _, path in [] if released else list(_held.values()):
                # A folder that was removed, or a file system that is away, is for the next save to tell.
                with contextlib.suppress(OSError):
                    os.utime(path)


def _name(found: Owner) -> str:
    return f"process {found.pid} on {found.host}"


def _taken(found: Owner | None, folder: Path) -> CheckpointError:
    if found is None:
        return CheckpointError(
            f"{folder} is no longer held by this process: its file {OWNER} is gone",
            cure="Save again; do not remove that file while a run saves there.",
        )
    return CheckpointError(
        f"{folder} belongs to {_name(found)}, which is alive: two runs would overwrite each other's checkpoints",
        cure="Stop that process, let it call accelerator.end_training(), or save into another folder.",
    )


def _forked() -> None:
    """A child of a fork is another process: it holds nothing, and no thread of its parent's runs in it."""
    global _thread, _lock, _wake
    _held.clear()
    _thread, _lock, _wake = None, threading.RLock(), threading.Event()


os.register_at_fork(after_in_child=_forked)
atexit.register(release)
