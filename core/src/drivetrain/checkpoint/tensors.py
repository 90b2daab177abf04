"""Plans, writes and reads a checkpoint's tensor files through ``torch.distributed.checkpoint``.

Tensors are stored as safetensors (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little endian, the
length of a JSON header; the header, which may end in spaces; the tensors' bytes without holes.
``safetensors.torch.save_file`` copies every tensor before it writes the first; here a few megabytes or one tensor are
in memory at a time, and none is copied that already lies contiguous on the CPU.

torch's own file storage keeps an index as a pickle, which is why it is not used (docs/decisions/0002).
:class:`DrivetrainReader` is a complete :class:`torch.distributed.checkpoint.StorageReader`, so that any program can
read our tensors with ``torch.distributed.checkpoint.load(state_dict, storage_reader=DrivetrainReader(folder))``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from drivetrain.checkpoint.folder import CheckedFile
from drivetrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, read_manifest
from drivetrain.errors import CheckpointCorruptError, CheckpointError

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _CODES.items()}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # Stored with a last dim of 2.
_CODE_OF = {dtype: code for code, dtype in _DTYPES.items()}
_CODE_OF |= {dtype: _CODE_OF[real] for dtype, real in _REAL.items()}

_FILE_BYTES = 2 << 30
"""A rank begins another file after this many bytes, so that checking them can be shared by several ranks."""
_TOGETHER = 4 << 20
"""Small tensors are written together up to this many bytes."""


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


def header_entries(sources: Iterable[Source], start: int = 0) -> dict[str, Any]:
    """The header's entries of tensors that lie one after another from ``start``.

    Raises:
        CheckpointError: a dtype that safetensors does not know.
    """
    entries: dict[str, Any] = {}
    for source in sources:
        code = _CODE_OF.get(source.dtype)
        if code is None:
            raise CheckpointError(
                f"{source.key} has dtype {dtype_name(source.dtype)}, which safetensors cannot hold",
                cure=f"Convert it to one of {', '.join(_CODES)}.",
            )
        end = start + math.prod(source.shape) * source.dtype.itemsize
        shape = [*source.shape, 2] if source.dtype in _REAL else list(source.shape)
        assert source.key not in entries, "two tensors of one file have the same key"
        entries[source.key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        start = end
    return entries


def header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str], length: int | None = None) -> bytes:
    """The head of a file: length and JSON, padded with spaces to ``length`` bytes in all (or to a multiple of 8)."""
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
    padded = (len(text) + 7) // 8 * 8 if length is None else length - 8
    if len(text) > padded:
        raise CheckpointError(f"a safetensors header of {len(text)} bytes does not fit into {padded}")
    return padded.to_bytes(8, "little") + text.ljust(padded)


def raw_bytes(tensors: Iterable[Tensor]) -> list[memoryview]:
    """Each tensor's bytes in row-major order; a view when it lies contiguous on the CPU, else a copy."""
    found = []
    for tensor in tensors:
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        plain = plain.resolve_neg().to("cpu").contiguous()
        flat = plain.reshape(-1)
        if flat.stride(0) != 1:  # A single element is contiguous whatever its stride, and cannot be seen as bytes.
            flat = flat.clone(memory_format=torch.contiguous_format)
        view: Any = flat.view(torch.uint8).numpy()
        found.append(memoryview(view))
    return found


def write_tensors(path: Path, sources: Sequence[Source], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write a new file, with one large tensor or a few small ones in memory at a time, and put it on the disk.

    Raises:
        CheckpointError: a dtype that safetensors does not know; nothing is written then.
        OSError: from the disk; ``FileExistsError`` when ``path`` exists.
    """
    # Widest elements first: then every tensor begins at a multiple of its element size, as readers by mmap need.
    widths = [-_REAL.get(source.dtype, source.dtype).itemsize for source in sources]
    ordered = [sources[number] for number in sorted(range(len(sources)), key=widths.__getitem__)]
    entries = header_entries(ordered)
    with CheckedFile(path) as file:
        file.write(header_bytes(entries, metadata or {}))
        batch: list[Source] = []
        start = 0  # of the batch
        for number, source in enumerate(ordered):
            batch.append(source)
            end = entries[source.key]["data_offsets"][1]
            if number + 1 < len(ordered):
                end_with_next = entries[ordered[number + 1].key]["data_offsets"][1]
                if end_with_next - start <= _TOGETHER:
                    continue
            data = raw_bytes([each.produce() for each in batch])
            for each, view in zip(batch, data, strict=True):
                offsets = entries[each.key]["data_offsets"]
                if len(view) != offsets[1] - offsets[0]:
                    raise CheckpointError(f"{each.key} changed its size while it was being saved")
            file.write(*data)
            batch, start = [], end
            del data
    return file.entry


class TensorFile:
    """A safetensors file open for reading; the bytes are mapped, not read, until they are copied.

    Raises:
        CheckpointCorruptError: not a safetensors file. Nothing in it is executed, whatever it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        untyped: Any = safe_open
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

    def check(self, requests: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Any]:
        """The library's handle of each tensor by key, dtype and shape; no tensor is read.

        Raises:
            CheckpointCorruptError: no such key, or not of this dtype and shape.
        """
        parts = []
        for key, dtype, shape in requests:
            if key not in self._keys:
                raise self._lacks(key)
            part = self._file.get_slice(key)
            stored = [*shape, 2] if dtype in _REAL else list(shape)
            code = _CODE_OF.get(dtype)
            if list(part.get_shape()) != stored or part.get_dtype() != code:
                raise CheckpointCorruptError(
                    f"{key} in {self.path.name} is {part.get_dtype()} {part.get_shape()}, not {code} {stored}",
                    whose=str(self.path.parent),
                )
            parts.append(part)
        return parts

    def read(
        self, requests: Sequence[tuple[str, torch.dtype, Sequence[int]]], boxes: Sequence[Sequence[slice]] | None = None
    ) -> Iterator[Tensor]:
        """Each tensor, or the box of it; may share the mapped file, so copy it before it is changed.

        Raises:
            CheckpointCorruptError: before the first tensor, as :meth:`check`.
        """
        parts = self.check(requests)
        for number, ((key, dtype, shape), part) in enumerate(zip(requests, parts, strict=True)):
            box = None if boxes is None else tuple(boxes[number])
            whole = box is None or all(cut == slice(0, size) for cut, size in zip(box, shape, strict=True))
            tensor: Tensor = self._file.get_tensor(key) if whole else part[box]
            yield torch.view_as_complex(tensor) if dtype in _REAL else tensor

    def copy(self, key: str) -> Tensor:
        """A tensor by its name alone, in memory of its own. Raises :class:`CheckpointCorruptError` for no such key."""
        if key not in self._keys:
            raise self._lacks(key)
        tensor: Tensor = self._file.get_tensor(key)
        return tensor.clone()

    def sources(self) -> dict[str, Source]:
        """Every tensor in the file by name; each is read on access."""
        found = {}
        for key in sorted(self._keys):
            part = self._file.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{key} in {self.path.name} has the dtype {part.get_dtype()}, which is not read")
            found[key] = Source(key, dtype, tuple(part.get_shape()), partial(self._file.get_tensor, key))
        return found

    def _lacks(self, key: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path.name} holds no {key}", whose=str(self.path.parent))


# ---- Planning and writing

Layout = dict[str, tuple[Any, ...]]
"""All that a rank's offer depends on: for each tensor by name dtype, whole shape and, in shards, where they lie."""


@dataclass(frozen=True)
class CachedPlan:
    """The outcome of one planning on this rank. Holds no tensors.

    The common plan is a function of every rank's layout and of nothing else. So it holds for each later save at which
    every rank has the layout that it had then.

    Args:
        layout: of what this rank offered.
        num_ranks: how many ranks took part.
        plan: what this rank writes.
        metadata: the index of all tensors.
        sharded: names of the tensors that some rank holds in shards.
    """

    layout: Layout
    num_ranks: int
    plan: SavePlan
    metadata: Metadata
    sharded: frozenset[str]


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of an offer. Not collective."""
    layout: Layout = {}
    sharded = in_shards(tensors)
    for name, tensor in tensors.items():
        place: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):  # Equivalent to its list of chunks, at a tenth of the cost.
            place = (tensor.device_mesh, tensor.placements)
        elif name in sharded:
            shard: Any = tensor
            place = tuple((chunk.offsets, chunk.sizes) for chunk in shard.__create_chunk_list__())
        layout[name] = (tensor.dtype, tensor.shape, *place)
    return layout


def in_shards(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the tensors that this rank holds in shards: DTensors, and tensors with ``__create_chunk_list__``."""
    return frozenset(name for name, tensor in tensors.items() if hasattr(tensor, "__create_chunk_list__"))


@dataclass
class Written:
    """What one rank put on the disk: chunks by tensor name, files by path, files of random state by coordinate."""

    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    rng: dict[int, str] = field(default_factory=dict)


def planner_of(tensors: dict[str, Any]) -> DefaultSavePlanner:
    """The planner that finds the bytes of a planned chunk in these tensors. Not collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    return planner


def of_lowest_rank(plans: list[SavePlan], names: AbstractSet[str]) -> list[SavePlan]:
    """The offers, with each chunk of these tensors left to the lowest rank that offers it."""
    offered: set[MetadataIndex] = set()
    reduced = []
    for plan in plans:
        items = [item for item in plan.items if item.index.fqn not in names or item.index not in offered]
        offered |= {item.index for item in items if item.index.fqn in names}
        reduced.append(replace(plan, items=items))
    return reduced


def common_plan(planner: DefaultSavePlanner, plans: list[SavePlan], rank: int) -> tuple[SavePlan, Metadata]:
    """Assign each chunk to the rank that offers it and has least to write so far. Not collective.

    Every rank computes the same answer from the same offers.

    Returns:
        What this rank writes, and the index of all tensors.

    Raises:
        CheckpointError: the ranks' chunks overlap or leave holes.
    """
    try:
        common, metadata = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as problem:
        raise CheckpointError(
            f"the ranks do not hold one state together: {problem}",
            cure="A tensor is either whole on every rank that has it or a DTensor on all of its mesh.",
        ) from problem
    return planner.finish_plan(common[rank]), metadata


@dataclass(frozen=True)
class PlannedFile:
    """One file that this rank will write: its name, its tensors, and their chunks."""

    name: str
    sources: tuple[Source, ...]
    chunks: tuple[tuple[str, Chunk], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


def plan_files(planner: DefaultSavePlanner, plan: SavePlan, prefix: str) -> list[PlannedFile]:
    """Distribute this rank's chunks over files. Nothing is copied or written. Not collective.

    Args:
        planner: of the tensors that were planned.
        plan: this rank's part.
        prefix: names of the files without their numbers.
    """
    files: list[tuple[str, list[Source], list[tuple[str, Chunk]]]] = []
    size = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "only tensors are planned"
        offsets, shape, dtype = tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        if not files or size + num_bytes > _FILE_BYTES:
            files.append((f"{prefix}-{len(files):03d}.safetensors", [], []))
            size = 0
        size += num_bytes
        file, sources, chunks = files[-1]
        name = item.index.fqn
        key = name if shape == tuple(data.size) else f"{name}@{','.join(map(str, offsets))}"
        produce = cast("Callable[[], Tensor]", partial(planner.resolve_data, item))
        sources.append(Source(key, dtype, shape, produce))
        chunks.append((name, Chunk(offsets, shape, file, key)))
    return [PlannedFile(file, tuple(sources), tuple(chunks)) for file, sources, chunks in files]


def write_files(files: Sequence[PlannedFile], data: Path) -> Written:
    """Write these files into the folder ``data`` and put them on the disk.

    Not collective. What is returned names files by their path below the checkpoint, of which ``data`` is a part.
    """
    written = Written()
    for file in files:
        path = f"{data.name}/{file.name}"
        written.files[path] = write_tensors(data / file.name, file.sources, file.metadata)
        written.chunks += [(name, Chunk(one.offsets, one.shape, path, one.key)) for name, one in file.chunks]
    return written


def index_tensors(metadata: Metadata, sharded: AbstractSet[str], written: list[Written]) -> dict[str, TensorEntry]:
    """The manifest's index, from the common plan and what each rank says it wrote.

    Raises:
        CheckpointError: a planned chunk that no rank wrote.
    """
    chunks: dict[str, list[Chunk]] = {}
    for part in written:
        for name, chunk in part.chunks:
            chunks.setdefault(name, []).append(chunk)
    entries = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        planned = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks}
        own = chunks.get(name, [])
        if planned != {(chunk.offsets, chunk.shape) for chunk in own}:
            raise CheckpointError(f"not every part of {name} was written")
        entries[name] = TensorEntry(dtype_name(saved.properties.dtype), tuple(saved.size), tuple(own), name in sharded)
    return entries


# ---- Reading


class DrivetrainReader(StorageReader):
    """Reads the tensors of a Drivetrain checkpoint for `torch.distributed.checkpoint`. Read only, nothing unpickled.

    Args:
        folder: the checkpoint.
        manifest: its manifest when it was read already.
    """

    def __init__(self, folder: str | Path, manifest: Manifest | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = manifest or read_manifest(self.folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The manifest's index as torch's ``Metadata``."""
        found: dict[str, Any] = {}
        dtypes: dict[str, TensorProperties] = {}
        for name, entry in self.manifest.tensors.items():
            if entry.dtype not in dtypes:
                dtypes[entry.dtype] = TensorProperties(dtype=torch_dtype(name, entry.dtype))
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in entry.chunks]
            found[name] = TensorStorageMetadata(dtypes[entry.dtype], torch.Size(entry.shape), chunks)
        return Metadata(found)

    def check_data(self, plan: LoadPlan) -> None:
        """Check that the files hold all that the plan reads, with the manifest's dtypes and shapes; nothing is read.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        for name, items in self._by_file(plan).items():
            TensorFile(self.folder / name).check([request for _, request in items])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file; a slice of one chunk is in memory at a time.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        with torch.no_grad():
            for name, items in self._by_file(plan).items():
                boxes = [
                    [slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True)]
                    for item, _ in items
                ]
                parts = TensorFile(self.folder / name).read([request for _, request in items], boxes)
                for (item, _), part in zip(items, parts, strict=True):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(
        self, plan: LoadPlan
    ) -> dict[str, list[tuple[ReadItem, tuple[str, torch.dtype, tuple[int, ...]]]]]:
        """What is read from each file: the plan's item with key, dtype and shape of its chunk."""
        found: dict[str, list[tuple[ReadItem, tuple[str, torch.dtype, tuple[int, ...]]]]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for item in plan.items:
            chunk = self.manifest.tensors[item.storage_index.fqn].chunks[item.storage_index.index or 0]
            name = item.dest_index.fqn
            spelled = self.manifest.tensors[name].dtype
            if spelled not in dtypes:
                dtypes[spelled] = torch_dtype(name, spelled)
            found.setdefault(chunk.file, []).append((item, (chunk.key, dtypes[spelled], chunk.shape)))
        return found

    # The remaining methods of the interface do nothing for a folder that is only read.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint, if one is named."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
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
        return Path(checkpoint_id).is_dir()


def read_tensor(folder: Path, name: str, entry: TensorEntry) -> torch.Tensor:
    """One whole tensor, put together from its chunks. Raises :class:`CheckpointCorruptError`."""
    dtype = torch_dtype(name, entry.dtype)
    whole = torch.empty(entry.shape, dtype=dtype)
    for chunk in entry.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))
        (whole[box],) = TensorFile(folder / chunk.file).read([(chunk.key, dtype, chunk.shape)])
    return whole
