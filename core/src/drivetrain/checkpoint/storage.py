"""Storage writer and reader of `torch.distributed.checkpoint` for checkpoint folders.

Its own file storage keeps an index as a pickle, which is why it is not used (docs/decisions/0002). The reader is a
complete :class:`torch.distributed.checkpoint.StorageReader`, so that any program can read our tensors with
``torch.distributed.checkpoint.load(state_dict, storage_reader=DrivetrainReader(folder))``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from drivetrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, read_manifest
from drivetrain.checkpoint.tensorfile import Source, TensorFile, dtype_name, write_tensors
from drivetrain.errors import CheckpointCorruptError, CheckpointError

# ---- What the ranks have settled about who writes what, kept for the next save of state that is laid out alike

Layout = dict[str, tuple[Any, ...]]
"""All that a rank's offer depends on: for each tensor by name dtype, whole shape and, in shards, where they lie."""


@dataclass(frozen=True)
class Settled:
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


@dataclass
class PlanMemory:
    """The plan of the save before, if there was one."""

    last: Settled | None = None

    def fits(self, layout: Layout, num_ranks: int) -> bool:
        """Whether it holds as far as this rank can tell. Not collective."""
        return self.last is not None and self.last.num_ranks == num_ranks and self.last.layout == layout


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of an offer. Not collective."""
    return {name: (tensor.dtype, tensor.shape, *_place(tensor)) for name, tensor in tensors.items()}


def in_shards(tensor: Tensor) -> bool:
    """Whether this rank holds parts of it: a DTensor, a ``FlatShard``, all that torch's planners ask for its chunks."""
    return hasattr(tensor, "__create_chunk_list__")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):  # Says the same as its list of chunks, at a tenth of the price.
        return tensor.device_mesh, tensor.placements
    if not in_shards(tensor):
        return ()
    shard: Any = tensor
    return tuple((chunk.offsets, chunk.sizes) for chunk in shard.__create_chunk_list__())


# ---- Storage writer and reader of `torch.distributed.checkpoint` for checkpoint folders

_FILE_BYTES = 2 << 30
"""A rank begins another file after this many bytes, so that checking them can be shared by several ranks."""


@dataclass
class Written:
    """What one rank put on the disk: chunks by tensor name, files by path, files of random state by coordinate."""

    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    rng: dict[int, str] = field(default_factory=dict)


def planner_of(tensors: dict[str, Any]) -> DefaultSavePlanner:
    """What finds the bytes of a planned chunk in these tensors. Not collective."""
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


def settle_plans(planner: DefaultSavePlanner, plans: list[SavePlan], rank: int) -> tuple[SavePlan, Metadata]:
    """Give each chunk to one of the ranks that offer it, the one with least to write so far. Not collective.

    Every rank computes the same answer from the same offers.

    Returns:
        What this rank writes, and the index of all tensors.

    Raises:
        CheckpointError: the ranks' chunks overlap or leave holes.
    """
    try:
        settled, metadata = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as problem:
        raise CheckpointError(
            f"the ranks do not hold one state together: {problem}",
            cure="A tensor is either whole on every rank that has it or a DTensor on all of its mesh.",
        ) from problem
    return planner.finish_plan(settled[rank]), metadata


@dataclass(frozen=True)
class PlannedFile:
    """One file that this rank is going to write: its name, what goes in, and the chunks that makes."""

    name: str
    sources: tuple[Source, ...]
    chunks: tuple[tuple[str, Chunk], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


def plan_files(planner: DefaultSavePlanner, plan: SavePlan, prefix: str) -> list[PlannedFile]:
    """Share this rank's chunks out to files. Nothing is copied or written. Not collective.

    Args:
        planner: of the tensors that were planned.
        plan: this rank's part.
        prefix: names of the files without their numbers.
    """
    files = []
    for number, items in enumerate(_files(plan.items)):
        name = f"{prefix}-{number:03d}.safetensors"
        made = [_source(planner, item, name) for item in items]
        chunks = tuple((item.index.fqn, chunk) for item, (_, chunk) in zip(items, made, strict=True))
        files.append(PlannedFile(name, tuple(source for source, _ in made), chunks))
    return files


def write_files(files: Sequence[PlannedFile], data: Path) -> Written:
    """Write these files into the folder ``data``, one chunk in memory at a time, and put them on the disk.

    Not collective. What is returned names files by their path below the checkpoint, of which ``data`` is a part.
    """
    written = Written()
    for file in files:
        path = f"{data.name}/{file.name}"
        written.files[path] = write_tensors(data / file.name, file.sources, file.metadata)
        written.chunks.extend((name, replace(chunk, file=path)) for name, chunk in file.chunks)
    return written


def index_tensors(metadata: Metadata, sharded: AbstractSet[str], written: list[Written]) -> dict[str, TensorEntry]:
    """The manifest's index, from the common plan and what each rank says it wrote.

    Raises:
        CheckpointError: a planned chunk that nobody wrote.
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


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        num_bytes = item.tensor_storage_size() or 0
        if batch and size + num_bytes > _FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes
    if batch:
        yield batch


def _source(planner: DefaultSavePlanner, item: WriteItem, file: str) -> tuple[Source, Chunk]:
    data = item.tensor_data
    assert data is not None, "only tensors are planned"
    offsets, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    name = item.index.fqn
    key = name if shape == tuple(data.size) else f"{name}@{','.join(map(str, offsets))}"

    def produce() -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return Source(key, data.properties.dtype, shape, produce), Chunk(offsets, shape, file, key)


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
        """The manifest's index in torch's words."""
        return Metadata({name: _torch_metadata(name, entry) for name, entry in self.manifest.tensors.items()})

    def check_data(self, plan: LoadPlan) -> None:
        """Find in the files all that the plan reads, with the dtypes and shapes of the manifest; nothing is read.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        for file, requests in self._by_file(plan):
            for chunk, item in requests:
                file.check(chunk.key, self._dtype(item), chunk.shape)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file; a slice of one chunk is in memory at a time.

        Raises:
            CheckpointCorruptError: a file that is not what the manifest says.
        """
        with torch.no_grad():
            for file, requests in self._by_file(plan):
                for chunk, item in requests:
                    box = [
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(file.read(chunk.key, self._dtype(item), chunk.shape, box))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(self, plan: LoadPlan) -> Iterator[tuple[TensorFile, list[tuple[Chunk, ReadItem]]]]:
        """What is read from each file; one is open at a time."""
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, requests in by_file.items():
            yield TensorFile(self.folder / name), requests

    def _dtype(self, item: ReadItem) -> torch.dtype:
        name = item.dest_index.fqn
        return torch_dtype(name, self.manifest.tensors[name].dtype)

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self.manifest.tensors[index.fqn].chunks
        return chunks[index.index or 0]

    # What follows has nothing to do for a folder that is only read.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint, if one is named."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
            self.manifest = read_manifest(self.folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to set up: files are opened when they are read."""

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
        whole[box] = TensorFile(folder / chunk.file).read(chunk.key, dtype, chunk.shape)
    return whole


def _torch_metadata(name: str, entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(name, entry.dtype)),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in entry.chunks],
    )


def torch_dtype(name: str, spelled: str) -> torch.dtype:
    """The dtype of the tensor ``name`` as spelled; raises :class:`CheckpointCorruptError` when torch has none such."""
    dtype = getattr(torch, spelled, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError(f"{name} has the dtype {spelled!r}, which this torch does not know")
    return dtype

