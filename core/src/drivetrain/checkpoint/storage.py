"""Commits, replaces and deletes checkpoints atomically, on local and remote storages.

No torch, and nothing is collective. :class:`Storage` is the interface, and :func:`storage_of` returns the one of a
folder; its methods cover all differences between storages, so that no other module depends on the kind of a folder.

In the file system (:class:`LocalStorage`) a checkpoint is first written into a hidden *staging* folder. A new
checkpoint's staging folder stands beside its target and is renamed to it. When the target exists (an older checkpoint,
or a folder that holds other files too) the staging folder stands inside it: its parts, whose names are new, are moved
next to the old ones, and replacing the one file ``manifest.json`` makes the new checkpoint valid. The files that the
old manifest named are deleted only then; all other files stay. The process that writes owns the folder
(:mod:`drivetrain.checkpoint.owner`).

A remote storage (:class:`RemoteStorage`) has no rename. There a save writes into a new data folder of the target
itself, and ``manifest.json``, put last by one request, makes the checkpoint valid; what has no manifest is no
checkpoint. Two runs that save in one remote folder are found when the second completes a checkpoint of the same name.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, Self, TypeVar

from drivetrain.checkpoint import owner
from drivetrain.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Manifest, read_manifest
from drivetrain.checkpoint.remote import Folder, RemoteFolder
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

logger = logging.getLogger(__name__)

_DATA = re.compile(r"data-[0-9a-f]{12}")
_STAGING = re.compile(r"\.(?:tmp|trash)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{12}-.*", re.DOTALL)
_BLOCK = 4 << 20  # Checksum and write in blocks that stay in the processor's cache.
_READ = 1 << 20
"""Bytes of a file that are read at once to check it."""

F = TypeVar("F", Path, RemoteFolder)
"""A folder, or a file in one, of one storage."""


@dataclass(frozen=True)
class Staging(Generic[F]):
    """A save that is not complete yet. Pickles, so that every rank can write its part.

    Args:
        target: the checkpoint's folder.
        folder: takes the files, by their paths below the checkpoint; ``target`` itself where nothing can be renamed.
        data: the new, empty ``data-...`` folder in it, whose name no other save has.
        before: checksum of the manifest that the commit replaces, where the storage compares it; 0 without one.
    """

    target: F
    folder: F
    data: F
    before: int = 0


class Storage(ABC, Generic[F]):
    """Storage operations of checkpoints. Called on the main process, unless a method says otherwise.

    Attributes:
        maps_files: a file can be mapped into memory. Else each read is a request, and reads in order of place are
            cheaper.
        may_not_answer: an error of reading may be the storage's and pass, so that it says nothing about the file.
    """

    maps_files: bool
    may_not_answer: bool

    # ---- A save

    @abstractmethod
    def check_reachable(self, target: F) -> None:
        """Raise :class:`CheckpointError` unless this rank can write to such a folder. On every rank."""

    @abstractmethod
    def stage(self, target: F) -> Staging[F]:
        """Begin a save: claim ``target`` where it has owners, make its data folder, clear away what dead saves left.

        Raises:
            CheckpointError: ``target`` is a file, its ``manifest.json`` is another program's, or another living process
                saves there; nothing was changed then.
        """

    @abstractmethod
    def hooks_folder(self, staging: Staging[F]) -> Path:
        """Return the local folder that this rank's hooks write into. On every rank that has hooks."""

    @abstractmethod
    def take_hooks_files(self, staging: Staging[F], folder: Path) -> None:
        """Move files that hooks have written into the save. On every rank that has hooks."""

    @abstractmethod
    def drop_hooks_files(self, folder: Path) -> None:
        """Remove what hooks have written for a save that failed. On every rank that has hooks."""

    @abstractmethod
    def sync(self, file: IO[bytes]) -> None:
        """Flush a new file to permanent storage before it is closed. On every rank."""

    @abstractmethod
    def free_bytes(self, folder: F) -> int | None:
        """Return the number of free bytes, if the storage reports it. On every rank."""

    @abstractmethod
    def sizes(self, staging: Staging[F], names: Collection[str]) -> dict[str, int]:
        """Return the sizes of those of these files, named from the staging folder, that this process sees."""

    @abstractmethod
    def commit(self, staging: Staging[F], manifest: Manifest) -> None:
        """Turn a save whose files are written into the checkpoint.

        A crash at any point leaves what was at the target before, or the new checkpoint; never a mixture.

        Raises:
            CheckpointError: another process took the folder over, or saved at the target since the save began.
        """

    @abstractmethod
    def abandon(self, staging: Staging[F]) -> None:
        """Remove what a save that failed has written; nothing of a checkpoint that is complete."""

    # ---- Checkpoints and folders

    @abstractmethod
    def subfolders(self, folder: F) -> list[F]:
        """Return the folders directly in a folder, in no order; none where it does not exist. On any rank."""

    @abstractmethod
    def delete(self, folder: F) -> None:
        """Delete a folder and all that is in it."""

    @abstractmethod
    def discard(self, checkpoint: F) -> None:
        """Delete a checkpoint so that a crash leaves no folder that looks like a complete one."""

    @abstractmethod
    def readable(self, checkpoint: F, manifest: Manifest) -> AbstractContextManager[Path]:
        """Enter a local folder with the files that hooks have written into a checkpoint. On every rank."""

    # ---- A folder of numbered checkpoints

    @abstractmethod
    def claim(self, folder: F) -> None:
        """Make a folder for numbered checkpoints and claim it where it has owners.

        Raises:
            CheckpointError: another living process saves in the folder.
        """

    @abstractmethod
    def check_claim(self, folder: F) -> None:
        """Raise :class:`CheckpointError` when another process has taken a claimed folder over."""

    @abstractmethod
    def clear_interrupted(self, folders: Iterable[F]) -> None:
        """Delete those of these folders that hold an interrupted save, where such a save has its final name."""

    @abstractmethod
    def sweep(self, parent: F) -> None:
        """Delete staging folders in a folder whose process, on this machine, is dead. Other machines' are kept."""

    def _clear_unreferenced(self, target: F) -> None:
        """Delete ``data-...`` folders that the manifest does not name: of dead saves, or of the checkpoint before."""
        try:
            named = {name.partition("/")[0] for name in read_manifest(target).files}
        except CheckpointNotFoundError:
            named = set()
        except CheckpointCorruptError:
            return
        for path in self.subfolders(target):
            if _DATA.fullmatch(path.name) and path.name not in named:
                self.delete(path)


# ---- The file system


class LocalStorage(Storage[Path]):
    """Folders of the file system, which have owners and appear by a rename."""

    maps_files = True
    may_not_answer = False

    def check_reachable(self, target: Path) -> None:
        return

    def stage(self, target: Path) -> Staging[Path]:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file", cure="Give a folder; it is made when it does not exist.")
        inside, numbered = target.is_dir(), owner.holds(target.parent)
        if numbered:
            owner.check(target.parent)
        else:
            owner.refuse_if_held(target.parent)
        if inside:
            if not owner.holds(target):
                _refuse_another_programs(target)  # Before a file of ours is put there.
            if not numbered:
                owner.claim(target)
            self._clear_unreferenced(target)
        parent = target if inside else target.parent
        parent.mkdir(parents=True, exist_ok=True)
        self.sweep(parent)
        folder = parent / _hidden_name("tmp", target)
        data = folder / _data_name()
        data.mkdir(parents=True)
        if not (inside or numbered):
            owner.claim_new(folder, target)
        return Staging(target, folder, data)

    def hooks_folder(self, staging: Staging[Path]) -> Path:
        return staging.folder

    def take_hooks_files(self, staging: Staging[Path], folder: Path) -> None:
        return

    def drop_hooks_files(self, folder: Path) -> None:
        return  # They are in the staging folder.

    def sync(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    def free_bytes(self, folder: Path) -> int | None:
        return shutil.disk_usage(folder).free

    def sizes(self, staging: Staging[Path], names: Collection[str]) -> dict[str, int]:
        return {name: (staging.folder / name).stat().st_size for name in names if (staging.folder / name).exists()}

    def commit(self, staging: Staging[Path], manifest: Manifest) -> None:
        target, folder = staging.target, staging.folder
        numbered, new = owner.holds(target.parent), folder.parent != target
        if numbered or not new:
            owner.check(target.parent if numbered else target)
        text = manifest.to_json().encode()
        with CheckedFile(folder / MANIFEST) as file:
            file.write(text)
        for each in {folder, *((folder / name).parent for name in manifest.files)}:
            sync_folder(each)
        if new:
            _appear(folder, target)
            if not numbered:
                owner.claim(target)
            return
        for part in folder.iterdir():
            if part.name != MANIFEST:
                _move_over(part, target / part.name)
        sync_folder(target)
        (folder / MANIFEST).replace(target / MANIFEST)
        sync_folder(target)
        folder.rmdir()
        self._clear_unreferenced(target)

    def abandon(self, staging: Staging[Path]) -> None:
        shutil.rmtree(staging.folder, ignore_errors=True)  # Gone already when only the last sync failed.

    def subfolders(self, folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []

    def delete(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def discard(self, checkpoint: Path) -> None:
        trash = checkpoint.parent / _hidden_name("trash", checkpoint)
        checkpoint.rename(trash)
        shutil.rmtree(trash)

    @contextmanager
    def readable(self, checkpoint: Path, manifest: Manifest) -> Iterator[Path]:
        yield checkpoint

    def claim(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        owner.claim(folder, beside=True)

    def check_claim(self, folder: Path) -> None:
        if owner.holds(folder):
            owner.check(folder)

    def clear_interrupted(self, folders: Iterable[Path]) -> None:
        return  # A save has a hidden name until it is whole.

    def sweep(self, parent: Path) -> None:
        if not parent.is_dir():
            return
        for path in parent.iterdir():
            match = _STAGING.fullmatch(path.name)
            if match and match["host"] == _host() and not owner.is_alive(int(match["pid"])):
                shutil.rmtree(path, ignore_errors=True)  # Two jobs may sweep at once.


@contextmanager
def full_disk_named(
    what: str, folder: Folder, free: int | None, cure: str, needed: Callable[[], int] | None = None
) -> Iterator[None]:
    """Raise our own error where what is written in the block does not fit on the disk; others are raised as they are.

    Args:
        what: the sentence's beginning, such as ``"could not export the model"``.
        folder: which is named.
        free: bytes that were free before; ``None`` = the storage has no such number, and no error is a full disk.
        cure: what helps.
        needed: says how many bytes the block was to write; ``None`` = nobody knows.

    Raises:
        CheckpointError: the disk, or this user's part of it, is full.
    """
    try:
        yield
    except (OSError, RuntimeError) as problem:
        full = _full_disk(problem)
        if free is None or full is None:
            raise
        room = f"{free / 1e6:,.1f} MB"
        if needed is None:
            size = f"It takes more than the {room} that were free in {folder}"
        else:
            size = f"It takes {needed() / 1e6:,.1f} MB, and {room} were free in {folder}"
        raise CheckpointError(f"{what}: {full.strerror}. {size}", cure=cure) from problem


def _full_disk(problem: BaseException | None) -> OSError | None:
    """Return the error of a full disk behind this one: torch.save ends in an error of its own after it."""
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return problem
        problem = problem.__cause__ or problem.__context__
    return None


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _appear(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if target.exists():
            owner.refuse_if_held(target)
        raise
    sync_folder(target.parent)


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
    return f"{zlib.crc32(owner.machine().encode()):08x}"


# ---- Remote storages


class RemoteStorage(Storage[RemoteFolder]):
    """Folders that fsspec reaches, which have neither a rename nor an owner; the manifest is the commit."""

    maps_files = False
    may_not_answer = True

    def check_reachable(self, target: RemoteFolder) -> None:
        target.check_installed()

    def stage(self, target: RemoteFolder) -> Staging[RemoteFolder]:
        _refuse_another_programs(target)
        self._clear_unreferenced(target)
        data = target / _data_name()
        before = _manifest_checksum(target)
        data.make()
        return Staging(target, target, data, before)

    def hooks_folder(self, staging: Staging[RemoteFolder]) -> Path:
        return Path(tempfile.mkdtemp(prefix="drivetrain-hooks-"))

    def take_hooks_files(self, staging: Staging[RemoteFolder], folder: Path) -> None:
        staging.folder.upload(folder)
        shutil.rmtree(folder)

    def drop_hooks_files(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # Gone already when they were sent.

    def sync(self, file: IO[bytes]) -> None:
        return  # The object appears, whole, when it is closed.

    def free_bytes(self, folder: RemoteFolder) -> int | None:
        return None

    def sizes(self, staging: Staging[RemoteFolder], names: Collection[str]) -> dict[str, int]:
        return {f"{staging.data.name}/{name}": size for name, size in staging.data.sizes().items()}

    def commit(self, staging: Staging[RemoteFolder], manifest: Manifest) -> None:
        target = staging.target
        if _manifest_checksum(target) != staging.before:
            raise CheckpointError(
                f"another run has saved at {target} since this save began; its checkpoint stays",
                cure="Let one run save in a folder, or give each its own.",
            )
        (target / MANIFEST).put(manifest.to_json().encode())
        try:
            self._clear_unreferenced(target)
        except Exception as problem:  # noqa: BLE001 (the storage's own; the checkpoint is complete)
            logger.warning("%s is complete and keeps older files, until the next save there: %s", target, problem)

    def abandon(self, staging: Staging[RemoteFolder]) -> None:
        try:
            # The manifest may have been put although the storage's answer was lost: then it names the files.
            self._clear_unreferenced(staging.target)
        except Exception as problem:  # noqa: BLE001 (the storage's own; what the save failed of is raised)
            logger.warning("%s keeps files of a save that failed, until the next one: %s", staging.target, problem)

    def subfolders(self, folder: RemoteFolder) -> list[RemoteFolder]:
        return folder.subfolders()

    def delete(self, folder: RemoteFolder) -> None:
        folder.delete()

    def discard(self, checkpoint: RemoteFolder) -> None:
        (checkpoint / MANIFEST).delete()
        checkpoint.delete()

    @contextmanager
    def readable(self, checkpoint: RemoteFolder, manifest: Manifest) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="drivetrain-hooks-") as copy:
            names = [name for name in checkpoint.sizes() if name not in {*manifest.files, MANIFEST}]
            checkpoint.download(names, Path(copy))
            yield Path(copy)

    def claim(self, folder: RemoteFolder) -> None:
        return

    def check_claim(self, folder: RemoteFolder) -> None:
        return

    def clear_interrupted(self, folders: Iterable[RemoteFolder]) -> None:
        for folder in folders:
            if not (folder / MANIFEST).exists():
                folder.delete()

    def sweep(self, parent: RemoteFolder) -> None:
        return  # What an interrupted save left has its final name: see :meth:`clear_interrupted`.


def _manifest_checksum(target: RemoteFolder) -> int:
    try:
        return zlib.crc32((target / MANIFEST).read_bytes())
    except FileNotFoundError:
        return 0


# ---- Both


_LOCAL, _REMOTE = LocalStorage(), RemoteStorage()


def storage_of(folder: Folder) -> Storage[Any]:
    """Return the storage on which a folder, or a file in one, lies."""
    return _REMOTE if isinstance(folder, RemoteFolder) else _LOCAL


def _data_name() -> str:
    return f"data-{secrets.token_hex(6)}"


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


class CheckedFile:
    """A new file that is counted and checksummed while it is written, and is on its storage when the ``with`` ends."""

    def __init__(self, path: Folder) -> None:
        self._file = path.open("xb", buffering=1 << 16)
        self._storage = storage_of(path)
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
            if kind is None:
                self._storage.sync(self._file)


def check_file(folder: Folder, name: str, expected: FileEntry) -> None:
    """Compare one file with its entry. Raises :class:`CheckpointCorruptError` that names the file."""
    path = folder / name
    cure = "Load an older checkpoint, or fetch this file again from where it came."
    try:
        size = path.stat().st_size
        if size != expected.size:
            what = f"{name} has {size} bytes where its manifest says {expected.size}"
            raise CheckpointCorruptError(what, whose=str(folder), cure=cure)
        crc, block = 0, memoryview(bytearray(_READ))
        with path.open("rb", buffering=0) as opened:
            file: Any = opened  # typing.IO leaves readinto out
            while count := file.readinto(block):
                crc = zlib.crc32(block[:count], crc)
    except FileNotFoundError as problem:
        raise CheckpointCorruptError(f"{name} is missing", whose=str(folder), cure=cure) from problem
    if crc != expected.crc32:
        raise CheckpointCorruptError(f"{name} was altered: its checksum is wrong", whose=str(folder), cure=cure)
