"""Writes and reads a checkpoint's tensor files: safetensors, which ``torch.distributed.checkpoint`` can read too.

Tensors are stored as safetensors (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little endian, the
length of a JSON header; the header, which may end in spaces; the tensors' bytes without holes.
``safetensors.torch.save_file`` copies every tensor before it writes the first; here one is in memory at a time, and
none is copied that already lies contiguous on the CPU.

torch's own file storage keeps an index as a pickle, which is why it is not used (docs/decisions/0002).
:class:`DrivetrainReader` is a complete :class:`torch.distributed.checkpoint.StorageReader`, so that any program can
read our tensors with ``torch.distributed.checkpoint.load(state_dict, storage_reader=DrivetrainReader(folder))``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from drivetrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, read_manifest
from drivetrain.checkpoint.remote import Folder, folder_of
from drivetrain.checkpoint.storage import CheckedFile, storage_of
from drivetrain.errors import CheckpointCorruptError, CheckpointError

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Safetensors' name of each dtype."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex dtypes, which safetensors does not have, and the one that each is stored in, with a last dim of 2."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str, spelled: str) -> torch.dtype:
    """The dtype with this name, of the tensor ``name``; raises :class:`CheckpointCorruptError` when torch has none."""
    dtype = getattr(torch, spelled, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError(f"{name} has the dtype {spelled!r}, which this torch does not know")
    return dtype


# ---- Safetensors files


@dataclass(frozen=True)
class Source:
    """One tensor to be written.

    Args:
        key: its name in the file.
        dtype: its dtype.
        shape: its shape.
        produce: returns the tensor, on any device, when it is written; it is released right after.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    produce: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Source:
        """A source of a tensor that is in memory already."""
        return cls(key, tensor.dtype, tuple(tensor.shape), tensor.detach)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _stored(dtype: torch.dtype, shape: Iterable[int]) -> tuple[str | None, list[int]]:
    """Safetensors' name of a dtype, ``None`` when there is none, and the shape in a file."""
    return _CODES.get(_REAL.get(dtype, dtype)), [*shape, 2] if dtype in _REAL else list(shape)


def header_entries(sources: Iterable[Source], start: int = 0) -> dict[str, Any]:
    """The header's entries of tensors that lie one after another from ``start``.

    Raises:
        CheckpointError: a dtype that safetensors does not know.
    """
    entries: dict[str, Any] = {}
    for source in sources:
        code, shape = _stored(source.dtype, source.shape)
        if code is None:
            raise CheckpointError(
                f"{source.key} has dtype {dtype_name(source.dtype)}, which safetensors cannot hold",
                cure=f"Convert it to one of {', '.join(map(dtype_name, _CODES))}.",
            )
        assert source.key not in entries, "two tensors of one file have the same key"
        end = start + source.num_bytes
        entries[source.key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        start = end
    return entries


def header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str], length: int | None = None) -> bytes:
    """The head of a file: length and JSON, padded with spaces to ``length`` bytes in all (or to a multiple of 8)."""
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
    padded = (len(text) + 7) // 8 * 8 if length is None else length - 8
    if len(text) > padded:
        raise CheckpointError(
            f"a safetensors header of {len(text)} bytes does not fit into {padded}",
            cure="Save it with accelerator.save_state, whose files have headers of any length.",
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order; a view if it is contiguous on the CPU, else a copy."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    flat = plain.resolve_neg().to("cpu").contiguous().reshape(-1)
    if flat.stride(0) != 1:  # A single element is contiguous whatever its stride, and cannot be seen as bytes.
        flat = flat.clone(memory_format=torch.contiguous_format)
    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)


def write_tensors(path: Folder, sources: Sequence[Source], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write a new file, with one tensor in memory at a time, and put it on its storage.

    Raises:
        CheckpointError: a dtype that safetensors does not know; nothing is written then.
        OSError: from the disk; ``FileExistsError`` when ``path`` exists.
    """
    # Widest elements first: then every tensor begins at a multiple of its element size, as readers by mmap need.
    ordered = sorted(sources, key=attrgetter("dtype.itemsize"), reverse=True)
    entries = header_entries(ordered)
    header = header_bytes(entries, metadata or {})
    with CheckedFile(path) as file:
        file.write(header)
        for source in ordered:
            file.write(raw_bytes(source.produce()))
            if file.size != len(header) + entries[source.key]["data_offsets"][1]:
                raise CheckpointError(
                    f"{source.key} changed its size while it was being saved",
                    cure="Save when nothing else changes the model, as after the optimizer's step.",
                )
    return file.entry


class TensorFile:
    """A safetensors file open for reading; the bytes are mapped, not read, until they are copied.

    Where a file cannot be mapped only the header is read, and then the rows that are asked for.

    Raises:
        CheckpointCorruptError: not a safetensors file. Nothing in it is executed, whatever it is.
    """

    def __init__(self, path: Folder) -> None:
        self.path = path
        untyped: Any = safe_open if storage_of(path).maps_files else _RangeFile
        try:
            self._file = untyped(path, framework="pt")
            self._keys = frozenset(map(str, self._file.keys()))
        except (SafetensorError, OSError) as problem:
            raise CheckpointCorruptError(
                f"{path.name} cannot be read as safetensors: {problem}",
                whose=str(path.parent),
                cure="Load an older checkpoint.",
            ) from problem

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})

    def check(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """The library's handle of a tensor, which is not read.

        Raises:
            CheckpointCorruptError: no such key, or not of this dtype and shape.
        """
        whose = str(self.path.parent)
        if key not in self._keys:
            raise CheckpointCorruptError(f"{self.path.name} holds no {key}", whose=whose)
        part = self._file.get_slice(key)
        found, wanted = (part.get_dtype(), part.get_shape()), _stored(dtype, shape)
        if found != wanted:
            what = f"{key} in {self.path.name} is {found[0]} {found[1]}, not {wanted[0]} {wanted[1]}"
            raise CheckpointCorruptError(what, whose=whose)
        return part

    def read(self, key: str, dtype: torch.dtype, shape: Sequence[int], box: Sequence[slice] | None = None) -> Tensor:
        """A tensor, or a box of it. It may share the mapped file, so copy it before it is changed.

        Raises:
            CheckpointCorruptError: as :meth:`check`.
        """
        part = self.check(key, dtype, shape)
        whole = box is None or all(cut == slice(0, size) for cut, size in zip(box, shape, strict=True))
        tensor: Tensor = self._file.get_tensor(key) if whole else part[tuple(box or ())]
        return torch.view_as_complex(tensor) if dtype in _REAL else tensor

    def position(self, key: str) -> int:
        """Return a tensor's offset in a file that is not mapped; 0 if there is none, which :meth:`check` refuses."""
        return int(self._file.entry(key)["data_offsets"][0]) if key in self._keys else 0

    def sources(self) -> dict[str, Source]:
        """Every tensor in the file by name; each is read on access."""
        found = {}
        for key in sorted(self._keys):
            part = self._file.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{key} in {self.path.name} has the dtype {part.get_dtype()}, which is not read",
                    cure=f"Write the file again with one of {', '.join(map(dtype_name, _CODES))}.",
                )
            found[key] = Source(key, dtype, tuple(part.get_shape()), partial(self._file.get_tensor, key))
        return found


_HEAD_BYTES = 256 << 10
"""Bytes of the first request to a file that is not mapped: the header of about 2,000 tensors."""

_MOST_HEAD_BYTES = 100_000_000
"""Safetensors' own limit of a header."""


class _RangeFile:
    """Replaces ``safetensors.safe_open`` for files that cannot be mapped: reads ranges.

    Raises:
        SafetensorError: no header of safetensors.
        OSError: from the storage.
    """

    def __init__(self, path: Any, framework: str) -> None:
        assert framework == "pt"
        self._path = path
        self._open: Any = None
        head = path.read_bytes(0, _HEAD_BYTES)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or length > _MOST_HEAD_BYTES:
            raise SafetensorError("it does not begin with the length of a header")
        if len(head) < 8 + length:
            head += path.read_bytes(len(head), 8 + length)
        self._start = 8 + length
        try:
            self._entries: dict[str, Any] = json.loads(head[8 : self._start])
            self._metadata: dict[str, str] = self._entries.pop("__metadata__", {})
            for entry in self._entries.values():
                first, last = entry["data_offsets"]
                size = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
                if not 0 <= first <= last or last - first != size:
                    raise SafetensorError(f"a tensor of {size} bytes lies from {first} to {last}")
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise SafetensorError(f"its header makes no sense: {type(problem).__name__}: {problem}") from problem

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def metadata(self) -> dict[str, str]:
        return self._metadata

    def get_tensor(self, key: str) -> Tensor:
        return _RangeSlice(self, key)[()]

    def get_slice(self, key: str) -> _RangeSlice:
        return _RangeSlice(self, key)

    def entry(self, key: str) -> Any:
        return self._entries[key]

    def read(self, start: int, end: int) -> bytearray:
        """Read a range of the tensors' bytes: the first by a request of its own, further ones from an open file."""
        start, end = self._start + start, self._start + end
        if self._open is None:
            self._open = False
            found = bytearray(self._path.read_bytes(start, end))
        else:
            self._open = self._open or self._path.open("rb")
            self._open.seek(start)
            found = bytearray(self._open.read(end - start))
        if len(found) != end - start:
            raise CheckpointCorruptError(f"{self._path.name} is truncated", whose=str(self._path.parent))
        return found


class _RangeSlice:
    """Replaces the result of ``safe_open(...).get_slice``; reads all columns of the requested rows."""

    def __init__(self, file: _RangeFile, key: str) -> None:
        self._file, self._entry = file, file.entry(key)

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        shape, dtype = self.get_shape(), _DTYPES[self.get_dtype()]
        first, last = self._entry["data_offsets"]
        if box and shape:
            at, stop, _ = box[0].indices(shape[0])
            row = math.prod(shape[1:]) * dtype.itemsize
            first, last, shape[0] = first + at * row, first + stop * row, stop - at
        if first == last:
            return torch.empty(shape, dtype=dtype)[(slice(None), *box[1:])[: len(box)]]
        rows = torch.frombuffer(self._file.read(first, last), dtype=dtype).reshape(shape)
        return rows[(slice(None), *box[1:])[: len(box)]]


# ---- Reading


class DrivetrainReader(StorageReader):
    """Reads the tensors of a Drivetrain checkpoint for `torch.distributed.checkpoint`. Read only, nothing unpickled.

    Args:
        folder: the checkpoint, or its address on a remote storage.
        manifest: its manifest when it was read already.
    """

    def __init__(self, folder: str | Folder, manifest: Manifest | None = None) -> None:
        self.folder = folder_of(folder)
        self.manifest = manifest or read_manifest(self.folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The manifest's index as torch's ``Metadata``."""
        found: dict[str, Any] = {}
        properties: dict[str, TensorProperties] = {}
        for name, entry in self.manifest.tensors.items():
            if entry.dtype not in properties:
                properties[entry.dtype] = TensorProperties(dtype=torch_dtype(name, entry.dtype))
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in entry.chunks]
            found[name] = TensorStorageMetadata(properties[entry.dtype], torch.Size(entry.shape), chunks)
        return Metadata(found)

    def check_data(self, plan: LoadPlan) -> None:
        """Check that the files hold all that the plan reads, with the manifest's dtypes and shapes; nothing is read.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        for file, _, stored in self._places(plan):
            file.check(*stored)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file; a slice of one chunk is in memory at a time.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        with torch.no_grad():
            for file, item, stored in self._places(plan):
                box = [slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True)]
                target = planner.resolve_tensor(item).detach()
                target.copy_(file.read(*stored, box))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _places(
        self, plan: LoadPlan
    ) -> Iterator[tuple[TensorFile, ReadItem, tuple[str, torch.dtype, tuple[int, ...]]]]:
        """Each item of a plan with the file that holds its chunk, open, and the chunk's key, dtype and shape there."""
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self.manifest.tensors[item.storage_index.fqn].chunks[item.storage_index.index or 0]
            by_file.setdefault(chunk.file, []).append((item, chunk))
        dtypes: dict[str, torch.dtype] = {}
        for name, items in by_file.items():
            file = TensorFile(self.folder / name)
            if not storage_of(self.folder).maps_files:  # Tensors that lie side by side share a request.
                items.sort(key=lambda each: file.position(each[1].key))
            for item, chunk in items:
                spelled = self.manifest.tensors[item.dest_index.fqn].dtype
                if spelled not in dtypes:
                    dtypes[spelled] = torch_dtype(item.dest_index.fqn, spelled)
                yield file, item, (chunk.key, dtypes[spelled], chunk.shape)

    # The remaining methods of the interface do nothing for a folder that is only read.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint, if one is named."""
        if checkpoint_id is not None:
            self.folder = folder_of(checkpoint_id)
            self.manifest = read_manifest(self.folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a folder."""
        return folder_of(checkpoint_id).is_dir()


def read_tensor(folder: Folder, name: str, entry: TensorEntry) -> torch.Tensor:
    """Read one full tensor from its chunks. Raises :class:`CheckpointCorruptError`."""
    dtype = torch_dtype(name, entry.dtype)
    whole = torch.empty(entry.shape, dtype=dtype)
    for chunk in entry.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))
        whole[box] = TensorFile(folder / chunk.file).read(chunk.key, dtype, chunk.shape)
    return whole
