"""Exports a model as safetensors files that Transformers reads, with one tensor in memory at a time."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.checkpoint.folder import CheckedFile, check_file, sync_folder
from drivetrain.checkpoint.manifest import read_manifest, stored_names
from drivetrain.checkpoint.tensors import Source, header_bytes, header_entries, raw_bytes, read_tensor, write_tensors
from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from os import PathLike

    from drivetrain.backend import Backend

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_RESERVE = 1 << 20
"""Bytes kept for the header of a file that is streamed; room for about 6,000 tensors, then another file begins."""
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
    limit = _parse_size(max_shard_size)

    def work() -> list[Path]:
        if not is_main:
            for _ in named_tensors:
                pass
            return []
        export = _Export(Path(directory), limit, safe_serialization, dict(tied or {}), dict(metadata or {}))
        return export.run(named_tensors)

    if backend is None:
        return work()
    ranks = Ranks(backend)
    return ranks.agree("export the model", work)[ranks.rank]


def export_checkpoint(
    checkpoint: str | Path, directory: str | Path, *, max_shard_size: int | str = "10GB", index: int = 0
) -> list[Path]:
    """Write the model of a checkpoint as :func:`export_model` does, one tensor in memory at a time. Not collective.

    Args:
        checkpoint: folder that ``save_state`` wrote; every file that is read is checked first.
        directory: see :func:`export_model`.
        max_shard_size: see :func:`export_model`.
        index: which of the run's models.

    Returns:
        The files written, index last.

    Raises:
        CheckpointError: not found, damaged, no such model, or ``save_state`` left its weights to a hook.
    """
    folder = Path(checkpoint).absolute()
    manifest = read_manifest(folder)
    wanted = {own.removeprefix("model."): own for own in manifest.specs(index) if own.startswith("model.")}
    if not wanted:
        raise CheckpointError(
            f"the checkpoint holds no weights of model {index}",
            whose=str(folder),
            cure="`drivetrain checkpoint inspect` shows what it holds.",
        )
    stored = stored_names(wanted.values(), index)
    entries = {name: manifest.tensors[stored[own]] for name, own in wanted.items()}
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
    """Save anything. Not collective.

    Args:
        obj: anything that pickles, or a dictionary of tensors.
        f: path or open binary file.
        safe_serialization: write safetensors instead of a pickle. ``obj`` is a flat dictionary of tensors, ``f`` a
            path; tensors that are the same memory are saved once.

    Raises:
        CheckpointError: ``safe_serialization`` with something that safetensors cannot hold.
    """
    if not safe_serialization:
        torch.save(obj, f)
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
    for name, tensor in obj.items():
        first = twins.first(str(name), tensor)
        if first is not None:
            metadata[str(name)] = first
        else:
            sources.append(Source.of(str(name), tensor))
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    try:
        write_tensors(unfinished, sources, metadata)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


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
        self._directory, self._limit, self._safe = directory, limit, safe
        self._stem, self._suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
        self._twins = _Twins(tied)
        self._aliases = aliases
        self._unfinished: list[Path] = []
        self._weights: list[list[str]] = []
        self._total = 0

    def run(self, named_tensors: Iterator[tuple[str, Tensor]]) -> list[Path]:
        """Write everything. The iterator is exhausted even after a failure: other ranks gather along with it."""
        shard: _Streamed | _Pickled | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for name, tensor in named_tensors:
                first = self._twins.first(name, tensor)
                if first is not None:
                    self._aliases[name] = first
                    continue
                size = tensor.numel() * tensor.element_size()
                self._total += size
                if shard is None or not shard.fits(name, size, self._limit):
                    if shard is not None:
                        shard.finish(self._aliases)
                    shard = self._begin()
                self._weights[-1].append(name)
                shard.add(name, tensor)
                del tensor
            (shard or self._begin()).finish(self._aliases)
            return self._publish()
        finally:
            for _ in named_tensors:
                pass
            if shard is not None:
                shard.close()
            for path in self._unfinished:
                path.unlink(missing_ok=True)

    def _begin(self) -> _Streamed | _Pickled:
        path = self._directory / f".{self._stem}-{len(self._unfinished) + 1:05d}.tmp"
        path.unlink(missing_ok=True)
        self._unfinished.append(path)
        self._weights.append([])
        return _Streamed(path) if self._safe else _Pickled(path)

    def _publish(self) -> list[Path]:
        count = len(self._unfinished)
        names = [f"{self._stem}{self._suffix}"]
        if count > 1:
            names = [f"{self._stem}-{number + 1:05d}-of-{count:05d}{self._suffix}" for number in range(count)]
        for path, name in zip(self._unfinished, names, strict=True):
            path.replace(self._directory / name)
        index = f"{self._stem}{self._suffix}.index.json"
        if count > 1:
            places = {weight: name for name, weights in zip(names, self._weights, strict=True) for weight in weights}
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": places}, indent=2)
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
        self._path = path
        self._entries: dict[str, Any] = {}
        self._size, self._text = 0, 0
        self._held: list[Source] = []
        self._file: CheckedFile | None = None

    def fits(self, name: str, size: int, limit: int) -> bool:
        """Whether one more tensor goes into this file; the first always does."""
        header = self._text + len(json.dumps(name)) + 512  # 512 bounds dtype, shape and offsets.
        return not self._entries or (self._size + size <= limit and header < _RESERVE // 2)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is written now unless the file is still small."""
        source = Source.of(name, tensor)
        entry = header_entries([source], self._size)
        self._entries |= entry
        self._text += len(json.dumps(entry))
        self._size += source.num_bytes
        self._held.append(source)
        if self._size > _HELD:
            self._stream()

    def finish(self, aliases: Mapping[str, str]) -> None:
        """Write what is held and the header; the file is on the disk then."""
        metadata = {"format": "pt", **{alias: first for alias, first in aliases.items() if first in self._entries}}
        if self._file is None:
            write_tensors(self._path, self._held, metadata)
            return
        with self._file as file:
            file.rewrite_start(header_bytes(self._entries, metadata, _RESERVE))

    def close(self) -> None:
        """Close a file that will not be finished."""
        if self._file is not None:
            self._file.close()

    def _stream(self) -> None:
        if self._file is None:
            self._file = CheckedFile(self._path)
            self._file.write(bytes(_RESERVE))
        for source in self._held:
            self._file.write(*raw_bytes([source.produce()]))
        self._held.clear()


class _Pickled:
    """One file by ``torch.save``; its tensors are held until it is full."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        self._tensors: dict[str, Tensor] = {}

    def fits(self, name: str, size: int, limit: int) -> bool:
        """Whether one more tensor goes into this file; the first always does."""
        return not self._tensors or self._size + size <= limit

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor."""
        self._tensors[name] = tensor.detach().to("cpu").clone()
        self._size += tensor.numel() * tensor.element_size()

    def finish(self, aliases: Mapping[str, str]) -> None:
        """Write the file. Further names of tied tensors are further names in the dictionary."""
        shared = {alias: self._tensors[first] for alias, first in aliases.items() if first in self._tensors}
        torch.save({**self._tensors, **shared}, self._path)

    def close(self) -> None:
        """Nothing is open before it is finished."""


def _parse_size(size: int | str) -> int:
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise CheckpointError(f"max_shard_size {size!r} is no size", cure="Write for example '10GB' or '500MiB'.")
        number, unit = float(match[1]), match[2].upper()
    if number <= 0:
        raise CheckpointError(f"max_shard_size must be positive, not {size!r}")
    return int(number * _UNITS[unit])
