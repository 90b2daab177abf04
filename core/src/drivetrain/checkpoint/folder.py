"""Manages checkpoint folders: ownership, atomic creation and replacement, numbering and integrity checks.

No torch, and nothing is collective.

A checkpoint is first written into a hidden *staging* folder. A new checkpoint's staging folder stands beside its target
and is renamed to it. When the target exists (an older checkpoint, or a folder that holds other files too) the staging
folder stands inside it: its parts, whose names are new, are moved next to the old ones, and replacing the one file
``manifest.json`` makes the new checkpoint valid. The files that the old manifest named are deleted only then; all
other files stay.

A remote storage has no rename. There a save writes into a new data folder of the target itself, and ``manifest.json``,
put last by one request, makes the checkpoint valid; what has no manifest is no checkpoint.

The process that writes owns the target, or the folder in which it numbers its checkpoints (:class:`Owner`). A remote
folder has no owner: two runs that save in it are found when the second completes a checkpoint of the same name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from drivetrain.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Manifest, read_manifest
from drivetrain.checkpoint.remote import Folder, RemoteFolder, delete, folder_of, subfolders
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

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


# ---- Numbered checkpoints

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True)
class Named:
    """One complete checkpoint.

    Args:
        number: in its folder's name.
        run: which run saved it, as its manifest says; empty when it was saved without.
        path: its folder.
    """

    number: int
    run: str
    path: Folder


class Naming:
    """``<folder>/checkpoint_{iteration}``.

    Args:
        folder: where the checkpoints lie, usually ``<project_dir>/checkpoints``; need not exist yet.
        total_limit: how many of this run's to keep, at least 1; ``None`` keeps all.
        iteration: number of the next one, or higher where that is taken.
        run: tells this run and those that it continues from others that saved in the same folder.
    """

    def __init__(
        self, folder: str | Folder, total_limit: int | None = None, iteration: int = 0, run: str = ""
    ) -> None:
        if total_limit is not None and total_limit < 1:
            raise CheckpointError(f"total_limit must be at least 1, not {total_limit}", cure="None keeps all of them.")
        self.folder, self.total_limit, self.iteration, self.run = folder_of(folder), total_limit, iteration, run

    def complete(self) -> list[Named]:
        """The complete checkpoints, oldest first. Folders with another name or without our manifest are skipped."""
        return [named for path, number in self._numbered() if (named := self._named(path, number)) is not None]

    def latest(self) -> Folder:
        """Folder of the newest complete checkpoint. Raises :class:`CheckpointNotFoundError` when there is none."""
        for path, number in reversed(self._numbered()):
            if self._named(path, number) is not None:
                return path
        raise CheckpointNotFoundError(
            f"{self.folder} holds no complete checkpoint",
            cure="Save one first, or give load_state the folder of another run's checkpoint.",
        )

    def claim_next(self, *, begun_anew: bool = False) -> int:
        """Claim the folder and return the number of the next save, which :attr:`iteration` then is.

        For the main process. A remote folder is not claimed.

        Args:
            begun_anew: the run goes on from no checkpoint; warn where the folder holds another's.

        Raises:
            CheckpointError: another living process saves in the folder.
        """
        if isinstance(self.folder, Path):
            self.folder.mkdir(parents=True, exist_ok=True)
            claim(self.folder, beside=True)
        self.iteration = max(self.iteration, self._highest() + 1)
        complete = self.complete() if begun_anew else []
        if complete:
            logger.warning(
                "%s holds checkpoints of an earlier run, up to %s, and this run was begun anew: its own go on from "
                "checkpoint_%d%s. Call load_state() first to continue that run, or choose another project_dir.",
                self.folder,
                complete[-1].path.name,
                self.iteration,
                "" if self.total_limit is None else ", and total_limit removes this run's only",
            )
        return self.iteration

    @property
    def path(self) -> Folder:
        """Folder of the checkpoint with the number :attr:`iteration`."""
        return self.folder / f"checkpoint_{self.iteration}"

    def prune(self, newest: Folder) -> list[Folder]:
        """Delete this run's oldest complete checkpoints beyond ``total_limit``; returns those.

        Only what is older than ``newest``, which was just written, can be deleted, and nothing of other runs. On a
        remote storage this deletes, too, what older numbers hold without a manifest: a save that was interrupted.

        Raises:
            CheckpointError: another process has taken the folder over, or ``newest`` is gone.
        """
        if self.total_limit is None:
            return []
        if isinstance(self.folder, Path) and holds(self.folder):
            check(self.folder)
        complete = self.complete()
        if newest.name not in (one.path.name for one in complete):
            raise CheckpointError(f"{newest}, which was just saved, is gone", cure="Look for what else removes it.")
        names = [one.path.name for one in complete]
        older = [one.path for one in complete[: names.index(newest.name)] if one.run == self.run]
        removed = older[: max(len(older) + 1 - self.total_limit, 0)]
        for path in removed:
            discard(path)
        if isinstance(self.folder, RemoteFolder):
            number = complete[names.index(newest.name)].number
            for path, older_number in self._numbered():
                if older_number < number and not (path / MANIFEST).exists():
                    delete(path)
        return removed

    def resumed(self, manifest: Manifest) -> int:
        """The next number after a loaded checkpoint, and after everything that already lies in the folder."""
        saved = manifest.info.get("iteration")
        self.iteration = 1 + max(self._highest(), saved if isinstance(saved, int) else -1, self.iteration - 1)
        self.run = str(manifest.info.get("run", ""))
        sweep(self.folder)
        return self.iteration

    def _highest(self) -> int:
        return max((number for _, number in self._numbered()), default=-1)

    def _named(self, path: Folder, number: int) -> Named | None:
        """The complete checkpoint in a folder; ``None`` where there is none."""
        try:
            manifest = read_manifest(path)
        except CheckpointError as problem:
            no_answer = isinstance(problem.__cause__, OSError) and not isinstance(problem, CheckpointNotFoundError)
            if no_answer and isinstance(path, RemoteFolder):
                raise  # Else a storage that is out of reach for a moment would make an older checkpoint the newest.
            # Half-written by a dead process, damaged, or not ours: it can neither be the newest nor be pruned.
            return None
        return Named(number, str(manifest.info.get("run", "")), path)

    def _numbered(self) -> list[tuple[Folder, int]]:
        """The folders with a number, lowest first."""
        names = ((path, _NAME.fullmatch(path.name)) for path in subfolders(self.folder))
        found = [(path, int(match[1])) for path, match in names if match]
        return sorted(found, key=lambda one: (one[1], one[0].name))


# ---- Atomic files and folders

_DATA = re.compile(r"data-[0-9a-f]{12}")
_STAGING = re.compile(r"\.(?:tmp|trash)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{12}-.*", re.DOTALL)
_BLOCK = 4 << 20  # Checksum and write in blocks that stay in the processor's cache.


class CheckedFile:
    """A new file that is counted and checksummed while it is written, and is on the disk when the ``with`` ends.

    On a remote storage it is there when the ``with`` ends.
    """

    def __init__(self, path: Folder) -> None:
        self._file = path.open("xb", buffering=1 << 16)
        self._on_disk = isinstance(path, Path)
        self.size, self.crc32 = 0, 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK):
            block = view[start : start + _BLOCK]
            self.crc32 = zlib.crc32(block, self.crc32)
            self._file.write(block)
        self.size += len(view)

    def close(self) -> None:
        """Close without syncing: what was written may not be on the disk."""
        self._file.close()

    def rewrite_start(self, data: bytes) -> None:
        """Overwrite the first bytes; the checksum no longer holds."""
        self._file.seek(0)
        self._file.write(data)

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.size, self.crc32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None and self._on_disk:
                self._file.flush()
                os.fsync(self._file.fileno())


def check_file(folder: Folder, name: str, expected: FileEntry) -> None:
    """Compare one file with its entry. Raises :class:`CheckpointCorruptError` that names the file."""
    path = folder / name
    cure = "Load an older checkpoint, or fetch this file again from where it came."
    try:
        size = path.stat().st_size
        if size != expected.size:
            what = f"{name} has {size} bytes where its manifest says {expected.size}"
            raise CheckpointCorruptError(what, whose=str(folder), cure=cure)
        crc = 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
    except FileNotFoundError as problem:
        raise CheckpointCorruptError(f"{name} is missing", whose=str(folder), cure=cure) from problem
    if crc != expected.crc32:
        raise CheckpointCorruptError(f"{name} was altered: its checksum is wrong", whose=str(folder), cure=cure)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RemoteStaging(RemoteFolder):
    """The target of a save on a remote storage, which is a checkpoint only when its manifest is put.

    Args:
        url: of the target.
        data: name of the new folder in it that takes the files.
        before: checksum of the manifest that was there, which the commit replaces; 0 without one.
    """

    data: str
    before: int

    @property
    def name(self) -> str:
        """Name of the save, which no other has, as that of a local staging folder."""
        return self.data


def stage(target: Folder) -> Folder:
    """Claim ``target``, make a staging folder for it and clear away what dead saves left there.

    Returns:
        The staging folder, with a new, empty ``data-...`` folder in it. On a remote storage the target itself, which
        is not claimed.

    Raises:
        CheckpointError: ``target`` is a file, its ``manifest.json`` is another program's, or another living process
            saves there; nothing was changed then.
    """
    if isinstance(target, RemoteFolder):
        _refuse_another_programs(target)
        _clear_unreferenced(target)
        remote = RemoteStaging(target.url, f"data-{secrets.token_hex(6)}", _manifest_checksum(target))
        (remote / remote.data).make()
        return remote
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file", cure="Give a folder; it is made when it does not exist.")
    inside, numbered = target.is_dir(), holds(target.parent)
    if numbered:
        check(target.parent)
    else:
        refuse_if_held(target.parent)
    if inside:
        if not holds(target):
            _refuse_another_programs(target)  # Before a file of ours is put there.
        if not numbered:
            claim(target)
        _clear_unreferenced(target)
    parent = target if inside else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    staging = parent / _hidden_name("tmp", target)
    (staging / f"data-{secrets.token_hex(6)}").mkdir(parents=True)
    if not (inside or numbered):
        _create(staging / OWNER, _real(target))  # It appears with the folder.
    return staging


def data_folder(staging: Folder) -> Folder:
    """The one ``data-...`` folder of a staging folder."""
    if isinstance(staging, RemoteStaging):
        return staging / staging.data
    assert isinstance(staging, Path), "stage has made it"
    (folder,) = (path for path in staging.iterdir() if _DATA.fullmatch(path.name))
    return folder


def written_sizes(staging: Folder, names: Collection[str]) -> dict[str, int]:
    """Sizes of those of these files, named from the staging folder, that this process sees."""
    if isinstance(staging, RemoteStaging):
        return {f"{staging.data}/{name}": size for name, size in (staging / staging.data).sizes().items()}
    return {name: (staging / name).stat().st_size for name in names if (staging / name).exists()}


def abandon(staging: Folder) -> None:
    """Remove what a save that failed has written; nothing of a checkpoint that is complete."""
    if isinstance(staging, Path):
        shutil.rmtree(staging, ignore_errors=True)  # Gone already when only the last sync failed.
        return
    try:
        # The manifest may have been put although the storage's answer was lost: then it names the files.
        _clear_unreferenced(RemoteFolder(staging.url))
    except Exception as problem:  # noqa: BLE001 (the storage's own; what the save failed of is raised)
        logger.warning("%s keeps files of a save that failed, until the next one: %s", staging, problem)


def commit(staging: Folder, target: Folder, manifest: Manifest) -> None:
    """Turn a staging folder, whose files are on the disk, into the checkpoint ``target``.

    A crash at any point leaves what was at ``target`` before, or the new checkpoint; never a mixture.

    Raises:
        CheckpointError: another process took the folder over, or saved at a new ``target`` first.
    """
    if isinstance(staging, RemoteStaging):
        _commit_remote(staging, manifest)
        return
    assert isinstance(staging, Path), "stage has made it"
    assert isinstance(target, Path), "of the same storage"
    numbered, new = holds(target.parent), staging.parent != target
    if numbered or not new:
        check(target.parent if numbered else target)
    text = manifest.to_json().encode()
    with CheckedFile(staging / MANIFEST) as file:
        file.write(text)
    for folder in {staging, *((staging / name).parent for name in manifest.files)}:
        sync_folder(folder)
    if new:
        _appear(staging, target)
        if not numbered:
            claim(target)
        return
    for part in staging.iterdir():
        if part.name != MANIFEST:
            _move_over(part, target / part.name)
    sync_folder(target)
    (staging / MANIFEST).replace(target / MANIFEST)
    sync_folder(target)
    staging.rmdir()
    _clear_unreferenced(target)


def _commit_remote(staging: RemoteStaging, manifest: Manifest) -> None:
    target = RemoteFolder(staging.url)
    if _manifest_checksum(target) != staging.before:
        raise CheckpointError(
            f"another run has saved at {target} since this save began; its checkpoint stays",
            cure="Let one run save in a folder, or give each its own.",
        )
    (target / MANIFEST).put(manifest.to_json().encode())
    try:
        _clear_unreferenced(target)
    except Exception as problem:  # noqa: BLE001 (the storage's own; the checkpoint is complete)
        logger.warning("%s is complete and keeps older files, until the next save there: %s", target, problem)


def _manifest_checksum(target: RemoteFolder) -> int:
    try:
        return zlib.crc32((target / MANIFEST).read_bytes())
    except FileNotFoundError:
        return 0


def _appear(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if target.exists():
            refuse_if_held(target)
        raise
    sync_folder(target.parent)


def discard(folder: Folder) -> None:
    """Delete a checkpoint so that a crash on the way leaves no folder that looks whole."""
    if isinstance(folder, RemoteFolder):
        (folder / MANIFEST).delete()
        folder.delete()
        return
    trash = folder.parent / _hidden_name("trash", folder)
    folder.rename(trash)
    shutil.rmtree(trash)


def sweep(parent: Folder) -> None:
    """Delete staging folders whose process, on this machine, is dead. Other machines' are left alone.

    A remote folder has none; see :meth:`Naming.prune`.
    """
    if not isinstance(parent, Path) or not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _STAGING.fullmatch(path.name)
        if match and match["host"] == _host() and not is_alive(int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)  # Two jobs may sweep at once.


def _refuse_another_programs(target: Folder) -> None:
    """Raise :class:`CheckpointError` when a save would overwrite what is not of this format."""
    try:
        read_manifest(target)
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return
    except CheckpointError as problem:
        raise CheckpointError(
            f"{target / MANIFEST} is not of the format {FORMAT} that this Drivetrain writes; it would be overwritten",
            cure="Save into another folder.",
        ) from problem


def _clear_unreferenced(target: Folder) -> None:
    """Delete ``data-...`` folders that the manifest does not name: of saves that died, or of the checkpoint before."""
    try:
        named = {name.partition("/")[0] for name in read_manifest(target).files}
    except CheckpointNotFoundError:
        named = set()
    except CheckpointCorruptError:
        return
    for path in subfolders(target):
        if _DATA.fullmatch(path.name) and path.name not in named:
            delete(path)


def _move_over(source: Path, target: Path) -> None:
    if source.is_dir() and target.is_dir():
        for part in source.iterdir():
            _move_over(part, target / part.name)
        source.rmdir()
    else:
        source.replace(target)


def _hidden_name(kind: str, target: Path) -> str:
    return f".{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(6)}-{target.name}"


def _host() -> str:
    """Checksum of the machine identifier, within which process ids are comparable."""
    return f"{zlib.crc32(machine().encode()):08x}"


# ---- Inspection


@dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance.

    Args:
        path: its folder.
        manifest: everything but the numbers.
        num_bytes: size of all files that the manifest names.
        problems: one sentence for each file that is missing, truncated or altered; empty when it is whole.
    """

    path: Folder
    manifest: Manifest
    num_bytes: int
    problems: tuple[str, ...] = ()


def inspect(path: str | Folder) -> Inspection:
    """Read a checkpoint's manifest and check every file. Not collective.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: the manifest itself is damaged.
        CheckpointError: the manifest is another program's or of a newer format.
    """
    folder = folder_of(path).absolute()
    manifest = read_manifest(folder)
    problems = []
    for name, entry in manifest.files.items():
        try:
            check_file(folder, name, entry)
        except CheckpointCorruptError as problem:
            problems.append(problem.what)
    return Inspection(folder, manifest, sum(entry.size for entry in manifest.files.values()), tuple(problems))
