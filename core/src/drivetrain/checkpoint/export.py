"""Exports a model as safetensors files that Transformers reads, with one tensor in memory at a time."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.checkpoint.manifest import read_manifest, stored_name
from drivetrain.checkpoint.remote import Folder, folder_of, local_folder
from drivetrain.checkpoint.storage import CheckedFile, check_file, full_disk_named, sync_folder
from drivetrain.checkpoint.tensors import Source, header_bytes, header_entries, raw_bytes, read_tensor, write_tensors
from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import CheckpointError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from os import PathLike

    from drivetrain.backend import Backend

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_RESERVE = 1 << 20
"""Bytes kept for the header of a file that is streamed. Another file begins when half is used: about 6,000 names."""
_HELD = 16 << 20
"""A file's first bytes are held back in memory, so that a small one gets a header that fits."""


def export_model(
    named_tensors: Iterator[tuple[str, Tensor]],
    directory: str | Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    is_main: bool = True,
    tied: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    backend: Backend | None = None,
) -> list[Path]:
    """Write a model's tensors as ``model.safetensors``, or as numbered files with ``model.safetensors.index.json``.

    Every rank iterates to the end (the iterator may gather); the main process writes. Collective over all ranks when
    ``backend`` is given, else as collective as the iterator.

    Args:
        named_tensors: name and whole tensor, one at a time; released before the next is asked for.
        directory: made when it does not exist. An older export in it is replaced, other files stay.
        max_shard_size: largest file, in bytes or as ``"500MB"``, ``"2GiB"``; a single larger tensor has its own file.
        safe_serialization: ``False`` writes ``pytorch_model.bin`` by ``torch.save`` (a pickle; holds a file in memory).
        is_main: this process writes.
        tied: each further name of a tied tensor, with its first one; the tensor is saved under the first only, and the
            file's metadata keeps the others. Plain tensors that share memory are recognised without it.
        metadata: further names of tensors, with the first, which the iterator does not give; the file notes them.
        backend: lets every rank learn of a failure on the main process.

    Returns:
        The files written, index last; empty on the other ranks.

    Raises:
        CheckpointError: a dtype that safetensors does not know; with ``backend`` any failure, on every rank.
        OSError: from the disk, when there is no ``backend``. The older export is whole then.
    """
    limit, folder = _parse_size(max_shard_size), local_folder(directory, "a model is written into")

    def work() -> list[Path]:
        if not is_main:
            for _ in named_tensors:
                pass
            return []
        export = _Export(folder, limit, safe_serialization, dict(tied or {}), dict(metadata or {}))
        return export.run(named_tensors)

    if backend is None:
        return work()
    ranks = Ranks(backend)
    return ranks.agree("export the model", work)[ranks.rank]


def export_checkpoint(
    checkpoint: str | Folder, directory: str | Path, *, max_shard_size: int | str = "10GB", index: int = 0
) -> list[Path]:
    """Write the model of a checkpoint as :func:`export_model` does, one tensor in memory at a time. Not collective.

    Args:
        checkpoint: folder that ``save_state`` wrote, or its address; every file that is read is checked first.
        directory: see :func:`export_model`.
        max_shard_size: see :func:`export_model`.
        index: which of the run's models.

    Returns:
        The files written, index last.

    Raises:
        CheckpointError: not found, damaged, no such model, or ``save_state`` left its weights to a hook.
    """
    folder = folder_of(checkpoint).absolute()
    manifest = read_manifest(folder)
    wanted = {own.removeprefix("model."): own for own in manifest.specs(index) if own.startswith("model.")}
    if not wanted:
        raise CheckpointError(
            f"the checkpoint holds no weights of model {index}",
            whose=str(folder),
            cure="`drivetrain checkpoint inspect` shows what it holds.",
        )
    entries = {name: manifest.tensors[stored_name(own, index)] for name, own in wanted.items()}
    for file in sorted({chunk.file for entry in entries.values() for chunk in entry.chunks}):
        check_file(folder, file, manifest.files[file])
    tied = manifest.trainables[index]["extra"].get("tied", {})
    return export_model(
        ((name, read_tensor(folder, name, entry)) for name, entry in entries.items()),
        directory,
        max_shard_size=max_shard_size,
        metadata={alias: first for alias, first in tied.items() if first in entries},
    )


def save_object(obj: Any, f: str | PathLike[str] | IO[bytes], safe_serialization: bool = False) -> None:
    """Save anything; a file that is there already is replaced once the new one is whole. Not collective.

    Args:
        obj: anything that pickles, or a dictionary of tensors.
        f: path or open binary file.
        safe_serialization: write safetensors instead of a pickle. ``obj`` is a flat dictionary of tensors, ``f`` a
            path; tensors that are the same memory are saved once.

    Raises:
        CheckpointError: ``safe_serialization`` with something that safetensors cannot hold; the disk is full.
    """
    if not safe_serialization:
        if hasattr(f, "write"):
            torch.save(obj, f)
            return
        with _replacing(Path(f)) as unfinished:
            _pickle(obj, unfinished)
        return
    if hasattr(f, "write"):
        raise CheckpointError("safe_serialization writes to a path, not to an open file", cure="Give a file name.")
    if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise CheckpointError(
            "safe_serialization saves a flat dictionary of tensors only",
            cure="Give such a dictionary, or safe_serialization=False.",
        )
    path = Path(f)
    twins = _Twins({})
    metadata = {"format": "pt"}
    sources = []
    shared = {}
    for name, tensor in obj.items():
        first = twins.first(str(name), tensor)
        if first is not None:
            metadata[str(name)] = shared[str(name)] = first
        else:
            sources.append(Source.of(str(name), tensor))
    if shared:
        logger.warning(
            "%s: tensors that are the same memory are saved once: %s. Whoever reads the file gives them to the other "
            "names too, as load_state_dict of a model with tied parameters does.",
            path,
            ", ".join(f"{name} as {first}" for name, first in shared.items()),
        )
    with _replacing(path) as unfinished:
        write_tensors(unfinished, sources, metadata)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of a file once it is whole.

    What is there already stays whole until then. A device or a pipe is written to itself.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    unfinished.unlink(missing_ok=True)
    try:
        with _full_disk_named(f"could not save {path.name}", target.parent):
            yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _full_disk_named(what: str, folder: Path) -> AbstractContextManager[None]:
    free = shutil.disk_usage(folder).free if folder.is_dir() else None
    return full_disk_named(what, folder, free, "Free some space or save elsewhere; what was saved before is whole.")


def _pickle(obj: Any, path: Path) -> None:
    """Write a file by ``torch.save``, which by itself does not say that a disk is full."""
    with path.open("wb") as file:
        torch.save(obj, file)


class _Twins:
    """Finds tensors that share memory with one seen under another name."""

    def __init__(self, tied: dict[str, str]) -> None:
        self._tied = tied
        self._names: set[str] = set()
        self._seen: dict[tuple[Any, ...], tuple[str, weakref.ref[Tensor]]] = {}

    def first(self, name: str, tensor: Tensor) -> str | None:
        """The name under which this tensor was seen, ``None`` when it is new."""
        first = self._tied.get(name)
        if first in self._names:
            return first
        self._names.add(name)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.numel() == 0:
            return None
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = self._seen.get(place)
        # Memory of a tensor that is gone is given to the next one: the same address alone proves nothing.
        if known is not None and known[1]() is not None:
            return known[0]
        self._seen[place] = (name, weakref.ref(tensor))
        return None


class _Export:
    """The main process's export: writes temporary files, renames them, writes the index and deletes the old files."""

    def __init__(self, directory: Path, limit: int, safe: bool, tied: dict[str, str], aliases: dict[str, str]) -> None:
        self._directory, self._limit = directory, limit
        self._kind: type[_Streamed | _Pickled] = _Streamed if safe else _Pickled
        self._stem, self._suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
        self._twins = _Twins(tied)
        self._aliases = aliases
        self._shards: list[_Streamed | _Pickled] = []

    def run(self, named_tensors: Iterator[tuple[str, Tensor]]) -> list[Path]:
        """Write everything. The iterator is exhausted even after a failure: other ranks gather along with it."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _full_disk_named("could not export the model", self._directory):
                self._write(named_tensors)
                return self._publish()
        finally:
            for _ in named_tensors:
                pass
            for shard in self._shards:
                shard.close()
                shard.path.unlink(missing_ok=True)

    def _write(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            first = self._twins.first(name, tensor)
            if first is not None:
                self._aliases[name] = first
                continue
            self._room_for(tensor.numel() * tensor.element_size()).add(name, tensor)
            del tensor
        last = self._shards[-1] if self._shards else self._room_for(0)
        last.finish(self._aliases)

    def _room_for(self, size: int) -> _Streamed | _Pickled:
        """The file for so many more bytes; a file's first tensor may be larger than the limit."""
        shard = self._shards[-1] if self._shards else None
        if shard is None or (shard.names and (shard.size + size > self._limit or shard.is_full)):
            if shard is not None:
                shard.finish(self._aliases)
            path = self._directory / f".{self._stem}-{len(self._shards) + 1:05d}.tmp"
            path.unlink(missing_ok=True)
            shard = self._kind(path)
            self._shards.append(shard)
        return shard

    def _publish(self) -> list[Path]:
        count = len(self._shards)
        names = [f"{self._stem}{self._suffix}"]
        if count > 1:
            names = [f"{self._stem}-{number + 1:05d}-of-{count:05d}{self._suffix}" for number in range(count)]
        for shard, name in zip(self._shards, names, strict=True):
            shard.path.replace(self._directory / name)
        if count > 1:
            places = {weight: name for name, shard in zip(names, self._shards, strict=True) for weight in shard.names}
            total = sum(shard.size for shard in self._shards)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            index = f"{self._stem}{self._suffix}.index.json"
            unfinished = self._directory / f".{index}.tmp"
            unfinished.unlink(missing_ok=True)
            with CheckedFile(unfinished) as file:
                file.write(text.encode())
            unfinished.replace(self._directory / index)
            names.append(index)
        ours = re.compile(rf"{self._stem}(-\d{{5}}-of-\d{{5}})?{re.escape(self._suffix)}(\.index\.json)?")
        for path in self._directory.iterdir():
            # A reader prefers model.safetensors over an index: files of an older export must not stay beside ours.
            if ours.fullmatch(path.name) and path.name not in names:
                path.unlink()
        sync_folder(self._directory)
        return [self._directory / name for name in names]


class _Streamed:
    """One safetensors file whose tensors are not known beforehand.

    While it is small its tensors are held; then a reserved header is skipped and they are streamed, where a tensor may
    begin at an address that is no multiple of its element size (safetensors reads that).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {}
        """The header's entry of each tensor."""
        self.size, self._text = 0, 0
        self._held: list[Source] = []
        self._file: CheckedFile | None = None

    @property
    def is_full(self) -> bool:
        """Whether the header is full."""
        return self._text > _RESERVE // 2

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is written now unless the file is still small."""
        source = Source.of(name, tensor)
        entry = header_entries([source], self.size)
        self.names |= entry
        self._text += len(json.dumps(entry))
        self.size += source.num_bytes
        self._held.append(source)
        if self.size > _HELD:
            if self._file is None:
                self._file = CheckedFile(self.path)
                self._file.write(bytes(_RESERVE))
            for held in self._held:
                self._file.write(raw_bytes(held.produce()))
            self._held.clear()

    def finish(self, aliases: Mapping[str, str]) -> None:
        """Write what is held and the header; the file is on the disk then."""
        metadata = {"format": "pt", **{alias: first for alias, first in aliases.items() if first in self.names}}
        if self._file is None:
            write_tensors(self.path, self._held, metadata)
            return
        with self._file as file:
            file.rewrite_start(header_bytes(self.names, metadata, _RESERVE))

    def close(self) -> None:
        """Close the file, if it is open still."""
        if self._file is not None:
            self._file.close()


class _Pickled:
    """One file by ``torch.save``; its tensors are held until it is full."""

    is_full = False

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.names: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor."""
        self.names[name] = tensor.detach().to("cpu").clone()
        self.size += tensor.numel() * tensor.element_size()

    def finish(self, aliases: Mapping[str, str]) -> None:
        """Write the file and release its tensors. Further names of tied tensors are further names in the dictionary."""
        shared = {alias: self.names[first] for alias, first in aliases.items() if first in self.names}
        _pickle({**self.names, **shared}, self.path)
        self.names = dict.fromkeys(self.names, torch.empty(0))

    def close(self) -> None:
        """Nothing is open before it is finished."""


def _parse_size(size: int | str) -> int:
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise CheckpointError(
                f"max_shard_size={size!r} is not a size", cure="Write a number with a unit, such as '10GB' or '500MiB'."
            )
        number, unit = float(match[1]), match[2].upper()
    if number <= 0:
        raise CheckpointError(
            f"max_shard_size={size!r} is not above 0", cure="Write a size such as '10GB', or a number of bytes."
        )
    return int(number * _UNITS[unit])
