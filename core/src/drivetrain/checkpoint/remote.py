"""Reaches folders on remote storages by fsspec: ``s3://``, ``gs://``, ``hf://``, ``memory://`` and every other scheme.

No torch, and nothing is collective; fsspec is imported when the first remote folder is named.

:class:`RemoteFolder` has the part of :class:`pathlib.Path` by which checkpoints are read, so that reading is written
once. Writing differs, because such a storage has no rename: see :mod:`drivetrain.checkpoint.storage`. A new storage is
a file system of fsspec, never a class of this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, cast

from drivetrain.errors import CheckpointError

_READ_AHEAD = 8 << 20
"""Read-ahead of an open file in bytes, so that small tensors share a request."""

_LOCAL = ("file", "local")
"""Schemes that name folders of this machine."""


class _Stat(NamedTuple):
    st_size: int


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder, or a file in one, on a storage that fsspec reaches. Pickles as its address.

    Credentials and endpoints are those of the file system of this scheme: its environment variables and files, and
    fsspec's own configuration (``FSSPEC_S3_ENDPOINT_URL``). Each call asks the storage; no listing is kept.

    Args:
        url: ``scheme://...``; a slash at its end counts for nothing.
    """

    url: str

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        object.__setattr__(self, "url", f"{scheme}://{rest.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        """The folder around this one; a bucket's is the bucket."""
        around, _, _ = self.url.rpartition("/")
        return self if around.endswith("/") else RemoteFolder(around)

    def absolute(self) -> RemoteFolder:
        """Return this folder: a remote address is always absolute."""
        return self

    def check_installed(self) -> None:
        """Raise :class:`CheckpointError` unless a file system is installed for the scheme. Sends no request."""
        self.store()

    def exists(self) -> bool:
        """Whether there is a file or a folder here. Raises the storage's error if it does not answer."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is a file here. Raises as :meth:`exists`."""
        found = self._info()
        return found is not None and found["type"] == "file"

    def is_dir(self) -> bool:
        """Whether there is a folder here. Raises as :meth:`exists`."""
        found = self._info()
        return found is not None and found["type"] == "directory"

    def stat(self) -> _Stat:
        """The file's size. Raises :class:`FileNotFoundError` when there is none."""
        found = self._info()
        if found is None:
            raise FileNotFoundError(self.url)
        return _Stat(int(found["size"]))

    def open(self, mode: str, buffering: int = -1) -> IO[bytes]:
        """Open the file for ``"rb"``, or ``"xb"`` for one with a new name, which appears when it is closed."""
        store, path = self.store()
        if mode == "rb":
            return cast("IO[bytes]", store.open(path, "rb", block_size=max(buffering, _READ_AHEAD)))
        return cast("IO[bytes]", store.open(path, "wb"))

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """The file's bytes, or a range of them; fewer where the file ends before. One request."""
        store, path = self.store()
        return cast("bytes", store.cat_file(path, start=start, end=end))

    def read_text(self, encoding: str) -> str:
        """The file's text."""
        return self.read_bytes().decode(encoding)

    def put(self, data: bytes) -> None:
        """Write the file by one request; on an object store this is atomic."""
        store, path = self.store()
        store.pipe_file(path, data)

    def make(self) -> None:
        """Make the folder where the storage has folders; object stores have names only, and a bucket is not made."""
        store, path = self.store()
        if store.root_marker:
            store.makedirs(path, exist_ok=True)

    def subfolders(self) -> list[RemoteFolder]:
        """The folders directly in this one, by one listing; none where nothing is here."""
        store, path = self.store()
        try:
            found = store.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # An object store may list an object for the folder itself, which the storage's own pages make.
        folders = {str(each["name"]).strip("/") for each in found if each["type"] == "directory"} - {path.strip("/")}
        return [self / folder.rpartition("/")[2] for folder in sorted(folders)]

    def sizes(self) -> dict[str, int]:
        """Size of every file below this folder by its path from here, by one listing."""
        store, path = self.store()
        try:
            found = store.find(path, detail=True)
        except FileNotFoundError:
            return {}
        start = len(path.strip("/")) + 1
        sizes = {str(name).strip("/")[start:]: int(each["size"]) for name, each in found.items() if name[-1] != "/"}
        return {name: size for name, size in sizes.items() if name}

    def delete(self) -> None:
        """Delete the file, or the folder with all below it; nothing where nothing is here."""
        store, path = self.store()
        try:
            store.rm(path, recursive=True)
        except FileNotFoundError:
            return

    def upload(self, folder: Path) -> None:
        """Copy every file below a local folder to the same place below this one."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            target = self / file.relative_to(folder).as_posix()
            target.parent.make()
            store, path = target.store()
            store.put_file(str(file), path)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy these files to the same place below a local folder."""
        for name in names:
            local = folder / name
            local.parent.mkdir(parents=True, exist_ok=True)
            store, path = (self / name).store()
            store.get_file(path, str(local))

    def _info(self) -> dict[str, Any] | None:
        # Not fsspec's `exists`, which takes a storage that does not answer for one that has no such file.
        store, path = self.store()
        try:
            return cast("dict[str, Any]", store.info(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def store(self) -> tuple[Any, str]:
        """The file system, which fsspec keeps for each process and thread, and the path in it."""
        from fsspec.core import url_to_fs

        try:
            store, path = url_to_fs(self.url)
        except (ImportError, ValueError) as problem:
            raise _unreachable(self.url, problem) from problem
        store.invalidate_cache()  # Listings of before: other processes write, too.
        return store, path


Folder: TypeAlias = Path | RemoteFolder
"""A folder of checkpoints on any storage."""


def folder_of(path: str | os.PathLike[str] | RemoteFolder) -> Folder:
    """The folder that a path or an address names; ``file://`` is a path of this machine.

    Raises:
        CheckpointError: a ``Path`` was made of an address, or two file systems are joined by ``::``.
    """
    if isinstance(path, RemoteFolder):
        return path
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        _refuse_swallowed_slash(text)
        return Path(text)
    if scheme in _LOCAL:
        return Path(rest)
    if "::" in scheme:
        raise CheckpointError(
            f"{text} joins two file systems, and a cache may not stand between a checkpoint and its storage",
            cure=f"Write the last part only: {text.rpartition('::')[2]}.",
        )
    return RemoteFolder(text)


def local_folder(path: str | os.PathLike[str], what: str) -> Path:
    """The local folder that is named, for what writes by other means than checkpoints do.

    Args:
        path: of the caller.
        what: begins the message, as in "a model is written into".

    Raises:
        CheckpointError: it is on a remote storage; nothing was written.
    """
    folder = folder_of(path)
    if isinstance(folder, RemoteFolder):
        raise CheckpointError(
            f"{what} a folder of this machine, and {folder} is none",
            cure="Name a local folder, and copy it with the storage's own command. save_state and load_state take such "
            "an address.",
        )
    return folder


def is_special(path: Folder) -> bool:
    """Whether reading would never end: a pipe or a device of this machine."""
    return isinstance(path, Path) and path.exists() and not path.is_file()


def newest_below(folder: Folder, name: str) -> Path | None:
    """The folder with the newest file of this name up to two folders deeper; ``None`` without one.

    On a remote storage each folder would take a request; there it is always ``None``.
    """
    if not isinstance(folder, Path):
        return None
    found = [path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{name}") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def _refuse_swallowed_slash(text: str) -> None:
    """Raise where text is what ``Path("s3://...")`` leaves of an address; it would name a local folder ``s3:``."""
    scheme, separator, rest = text.partition(":/")
    if not separator or not scheme.isalnum() or Path(f"{scheme}:").exists():
        return
    from fsspec.registry import known_implementations, registry

    if scheme in known_implementations or scheme in registry:
        raise CheckpointError(
            f"{text} has one slash where an address has two, as when a Path is made of it",
            cure=f'Pass text: "{scheme}://{rest}".',
        )


def _unreachable(url: str, problem: Exception) -> CheckpointError:
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0]
    known = known_implementations.get(scheme)
    cure = "Check the address, and what its file system takes from the environment."
    if isinstance(problem, ImportError) and known is not None:
        package = known["class"].partition(".")[0]
        # What fsspec implements itself needs a package that its message names.
        cure = f"Type: pip install {package}." if package != "fsspec" else "Install with pip what is named here."
    elif known is None:
        cure = "Check the spelling, or pip install the package that brings this scheme to fsspec."
    return CheckpointError(f"{scheme}:// cannot be reached: {problem}".rstrip("."), whose=url, cure=cure)
