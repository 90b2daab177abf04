"""Create and replace checkpoint folders atomically. No torch, not collective.

A checkpoint is first written into a hidden *staging* folder. A new checkpoint's staging folder stands beside its target
and is renamed to it. When the target exists (an older checkpoint, or a folder that holds other files too) the staging
folder stands inside it: its parts, whose names are new, are moved next to the old ones, and replacing the one file
``manifest.json`` turns the page. Only then do the files go that the old manifest named; other people's files stay.

Whoever writes holds the target, or the folder in which it numbers its checkpoints (:mod:`drivetrain.checkpoint.owner`).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from drivetrain.checkpoint import owner
from drivetrain.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Manifest, read_manifest
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

_DATA = re.compile(r"data-[0-9a-f]{12}")
_STAGING = re.compile(r"\.(?:tmp|trash)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{12}-.*", re.DOTALL)
_BLOCK = 4 << 20  # Checksum and write in blocks that stay in the processor's cache.


class CheckedFile:
    """A new file that is counted and checksummed while it is written, and is on the disk when the ``with`` ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=1 << 16)
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
        """Give up: what was written may not be on the disk."""
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
                self._file.flush()
                os.fsync(self._file.fileno())


def check_file(folder: Path, name: str, expected: FileEntry) -> None:
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
    """Put a folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stage(target: Path) -> Path:
    """Claim ``target``, make a staging folder for it and clear away what dead saves left there.

    Returns:
        The staging folder, with a new, empty ``data-...`` folder in it.

    Raises:
        CheckpointError: ``target`` is a file, its ``manifest.json`` is another program's, or another living process
            saves there; nothing was changed then.
    """
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
        _clear_unreferenced(target)
    parent = target if inside else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    staging = parent / _hidden_name("tmp", target)
    (staging / f"data-{secrets.token_hex(6)}").mkdir(parents=True)
    if not (inside or numbered):
        owner.claim_new(staging, target)
    return staging


def data_folder(staging: Path) -> Path:
    """The one ``data-...`` folder of a staging folder."""
    (folder,) = (path for path in staging.iterdir() if _DATA.fullmatch(path.name))
    return folder


def commit(staging: Path, target: Path, manifest: Manifest) -> None:
    """Turn a staging folder, whose files are on the disk, into the checkpoint ``target``.

    A crash at any point leaves what was at ``target`` before, or the new checkpoint; never a mixture.

    Raises:
        CheckpointError: another process took the folder over, or saved at a new ``target`` first.
    """
    numbered, new = owner.holds(target.parent), staging.parent != target
    if numbered or not new:
        owner.check(target.parent if numbered else target)
    text = manifest.to_json().encode()
    with CheckedFile(staging / MANIFEST) as file:
        file.write(text)
    for folder in {staging, *((staging / name).parent for name in manifest.files)}:
        sync_folder(folder)
    if new:
        _appear(staging, target)
        if not numbered:
            owner.claim(target)
        return
    for part in staging.iterdir():
        if part.name != MANIFEST:
            _move_over(part, target / part.name)
    sync_folder(target)
    (staging / MANIFEST).replace(target / MANIFEST)
    sync_folder(target)
    staging.rmdir()
    _clear_unreferenced(target)


def _appear(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if target.exists():
            owner.refuse_if_held(target)
        raise
    sync_folder(target.parent)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that a crash on the way leaves no folder that looks whole."""
    trash = folder.parent / _hidden_name("trash", folder)
    folder.rename(trash)
    shutil.rmtree(trash)


def sweep(parent: Path) -> None:
    """Delete staging folders whose process, on this machine, is dead. Other machines' are left alone."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _STAGING.fullmatch(path.name)
        if match and match["host"] == _host() and not owner.is_alive(int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)  # Two jobs may sweep at once.


def _refuse_another_programs(target: Path) -> None:
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


def _clear_unreferenced(target: Path) -> None:
    """Delete ``data-...`` folders that the manifest does not name: parts of saves that died, or of the page turned."""
    try:
        named = {name.partition("/")[0] for name in read_manifest(target).files}
    except CheckpointNotFoundError:
        named = set()
    except CheckpointCorruptError:
        return
    for path in target.iterdir():
        if _DATA.fullmatch(path.name) and path.name not in named:
            shutil.rmtree(path)


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
    """Who may judge by process id."""
    return f"{zlib.crc32(owner.machine().encode()):08x}"
