"""Saves a run as a checkpoint, at once or from a copy in host memory by a background thread.

A save collects the state, assigns tensors to ranks, writes, and commits; after each step all ranks check that none has
failed. The folder appears atomically.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from drivetrain.backend import name_of
from drivetrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, stored_name
from drivetrain.checkpoint.remote import Folder, folder_of
from drivetrain.checkpoint.storage import Staging, full_disk_named, storage_of
from drivetrain.checkpoint.tensors import Source, dtype_name, write_tensors
from drivetrain.checkpoint.tree import Encoder
from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.rng import capture_rng
from drivetrain.errors import CheckpointError
from drivetrain.parameter_names import original_name
from drivetrain.topology import DATA_AXES, Topology

if TYPE_CHECKING:
    from drivetrain.backend import Backend, PortableState, TensorSpec

logger = logging.getLogger(__name__)

SaveHooks = Callable[[Path], Collection[int]]

_FILE_BYTES = 2 << 30
"""A rank begins another file after this many bytes, so that checking them can be shared by several ranks."""


# ---- Contents of a checkpoint


class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict(state)``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Portable(Protocol):
    """The part of :class:`~drivetrain.api.Trainable` that checkpoints use; an average of a model has it too."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    def portable_state(self) -> PortableState: ...

    def portable_template(self, saved: Mapping[str, TensorSpec], /) -> PortableState: ...

    def load_portable_state(self, state: PortableState, /) -> None: ...


@dataclass
class TrainingState:
    """A run's state.

    Args:
        trainables: the prepared models with their optimizers, in the same order on every rank and in every run; after
            them the averages of models.
        averages: how many of ``trainables`` are averages.
        newer: names of objects that were made after the checkpoint that is loaded: they stay as they are.
        ended: whether the saved state of an object that is not here, given its name and its encoded state, is of
            something that had come to its end, so that nothing is lost without it.
        objects: scheduler, loaders, the user's own, by a name that does not change; the same on every rank.
        counters: numbers of the run (optimizer steps, ...); a load replaces its values in place.
        rng: whether the processes' random state goes along, kept per data-parallel coordinate.
        remember: for objects by name, where loading ``state_dict()`` again would not be enough: returns a function that
            takes the object back to what it is now.
    """

    trainables: Sequence[Portable] = ()
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    rng: bool = False
    remember: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    averages: int = 0
    newer: frozenset[str] = frozenset()
    ended: Callable[[str, Any], bool] = lambda _name, _state: False


# ---- Collecting the state


@dataclass(frozen=True)
class Collected:
    """The state that one rank contributes.

    Args:
        tensors: under their stored names; the live ones.
        buffers: names of those that are buffers of models.
        trainables: the encoded rest of each trainable.
        counters: encoded.
        objects: each object's state, encoded.
        rng: random state, encoded, with its tensors, on the first rank of each data-parallel coordinate.
    """

    tensors: dict[str, Tensor]
    buffers: frozenset[str]
    trainables: tuple[Any, ...]
    counters: Any
    objects: dict[str, Any]
    rng: tuple[Any, dict[str, Tensor]] | None


def collect(state: TrainingState, topology: Topology, skip_models: Collection[int] = ()) -> Collected:
    """Collect and encode the full state, without the ``model.*`` tensors of these trainables.

    Collective where an engine's ``portable_state`` is. Raises :class:`CheckpointError` for what no checkpoint can hold.
    """
    encoder = Encoder()
    tensors: dict[str, Tensor] = {}
    buffers: set[str] = set()
    trainables = []
    for index, trainable in enumerate(state.trainables):
        portable = trainable.portable_state()
        parameters = {f"model.{original_name(name)}" for name, _ in trainable.module.named_parameters()}
        for own, tensor in portable.tensors.items():
            stored = stored_name(own, index)
            of_model = own.startswith("model.")
            if of_model and own not in parameters:
                buffers.add(stored)
            if not (of_model and index in skip_models):
                tensors[stored] = tensor
        parts = {"optimizers": portable.optimizers, "extra": portable.extra}
        trainables.append(encoder.encode(parts, f"trainables.{index}"))
    counters = encoder.encode(state.counters, "counters")
    objects = {name: encoder.encode(item.state_dict(), f"objects.{name}") for name, item in state.objects.items()}
    # Replicated by contract; if they are not, words and numbers still come from one rank, the main process.
    is_main = topology.rank == 0
    tensors |= {name: tensor for name, tensor in encoder.tensors.items() if is_main or isinstance(tensor, DTensor)}
    rng = None
    coordinates = topology.mesh.coordinates(topology.rank)
    if state.rng and not any(at for axis, at in coordinates.items() if axis not in DATA_AXES):
        numbers = Encoder()
        rng = numbers.encode(capture_rng(topology.device), "rng"), numbers.tensors
    return Collected(tensors, frozenset(buffers), tuple(trainables), counters, objects, rng)


# ---- Which rank writes what

Layout = dict[str, tuple[Any, ...]]
"""Key of a rank's part of the plan: dtype, full shape, and offset in the full tensor of each tensor, by name."""


@dataclass(frozen=True)
class WritePlan:
    """Assignment of tensors to the ranks that write them. Holds no tensors, so it is kept for the next save.

    It depends only on the layouts of all ranks, so it stays valid while these are unchanged.

    Args:
        made_for: name of the data folder of the save that it was made for, which no other save has.
        num_ranks: number of ranks that took part.
        layout: of the tensors of this rank.
        buffers: names in it that are buffers.
        files: what this rank writes, by name of the file: each item of torch's plan with where it will lie.
        tensors: the manifest's index; files are named without their folder.
    """

    made_for: str
    num_ranks: int
    layout: Layout
    buffers: frozenset[str]
    files: Mapping[str, Sequence[tuple[WriteItem, Chunk]]]
    tensors: Mapping[str, TensorEntry]


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of these tensors. Not collective."""
    layout: Layout = {}
    for name, tensor in tensors.items():
        place: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):  # Equivalent to its list of chunks, at a tenth of the cost.
            place = (tensor.device_mesh, tensor.placements)
        elif hasattr(tensor, "__create_chunk_list__"):
            place = tuple((chunk.offsets, chunk.sizes) for chunk in tensor.__create_chunk_list__())
        layout[name] = (tensor.dtype, tensor.shape, *place)
    return layout


def make_plan(
    made_for: str, layout: Layout, planner: DefaultSavePlanner, buffers: frozenset[str], ranks: Ranks
) -> WritePlan:
    """Assign each chunk to the rank that offers it and has least to write so far. Collective over all ranks.

    Of a buffer every rank has its own running statistics. A checkpoint that took some from one rank and some from
    another would hold a state that no rank ever had, so the lowest rank that has a buffer writes it.

    Raises:
        CheckpointError: the ranks' chunks overlap or leave holes.
    """
    offers = ranks.agree("plan its part", lambda: (planner.create_local_plan(), buffers))
    of_lowest_rank = set[str]().union(*(names for _, names in offers))
    taken: set[MetadataIndex] = set()
    plans = []
    for plan, _ in offers:
        items = [item for item in plan.items if item.index.fqn not in of_lowest_rank or item.index not in taken]
        taken |= {item.index for item in items}
        plans.append(replace(plan, items=items))
    try:
        plans, _ = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as problem:
        raise CheckpointError(
            f"the parts of the state on the ranks do not make up whole tensors: {problem}",
            cure="Hand each tensor over whole on every rank that has it, or as a DTensor on all ranks of its mesh.",
        ) from problem
    files = [_in_files(plan.items, rank) for rank, plan in enumerate(plans)]
    chunks: dict[str, list[Chunk]] = {}
    shown: dict[str, WriteItem] = {}
    for item, chunk in (entry for each in files for entries in each.values() for entry in entries):
        chunks.setdefault(item.index.fqn, []).append(chunk)
        shown[item.index.fqn] = item
    tensors = {}
    for name, item in shown.items():
        data: Any = item.tensor_data
        is_sharded = item.type == WriteItemType.SHARD
        tensors[name] = TensorEntry(
            dtype_name(data.properties.dtype), tuple(data.size), tuple(chunks[name]), is_sharded
        )
    return WritePlan(made_for, ranks.world_size, layout, buffers, files[ranks.rank], tensors)


def _in_files(items: Sequence[WriteItem], rank: int) -> dict[str, list[tuple[WriteItem, Chunk]]]:
    """A rank's items by the file that they go to."""
    files: dict[str, list[tuple[WriteItem, Chunk]]] = {}
    file, size = "", 0
    for item in items:
        data: Any = item.tensor_data  # Only tensors are planned.
        offsets, shape, name = tuple(data.chunk.offsets), tuple(data.chunk.sizes), item.index.fqn
        num_bytes = math.prod(shape) * data.properties.dtype.itemsize
        if not files or size + num_bytes > _FILE_BYTES:
            file, size = f"tensors-{rank:05d}-{len(files):03d}.safetensors", 0
            files[file] = []
        size += num_bytes
        key = name if shape == tuple(data.size) else f"{name}@{','.join(map(str, offsets))}"
        files[file].append((item, Chunk(offsets, shape, file, key)))
    return files


# ---- One save


@dataclass(frozen=True)
class PlannedFile:
    """One file that this rank will write: its name, its tensors, and further header entries."""

    name: str
    sources: Sequence[Source]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


@dataclass(frozen=True)
class _Offer:
    """Data of a rank that are sent to the others before anything is written.

    Args:
        marks: a checksum of each object's state, which should be the same on every rank.
        kept: the save for which the kept plan was made, if this rank's layout is unchanged.
        staging: the save, as its storage has begun it; on the main process.
    """

    marks: dict[str, int]
    kept: str
    staging: Staging[Any] | None


class SaveWork:
    """One rank's part of one save: :meth:`prepare`, :meth:`copy` where training goes on meanwhile, :meth:`finish`.

    All of it in :meth:`whole_or_gone`.

    Args:
        path: the checkpoint's folder.
        backend: for the job's shape.
        ranks: all that save.
    """

    def __init__(self, path: str | Folder, backend: Backend, ranks: Ranks) -> None:
        self.target = folder_of(path).absolute()
        self._backend, self._ranks = backend, ranks
        self._storage = storage_of(self.target)
        self._staging: Staging[Any] | None = None  # Of the main process only, until all have agreed on it.
        self._of_hooks: Path | None = None  # The folder that this rank's hooks wrote into, until it is taken.
        self._files: list[PlannedFile] = []
        self._failure: Exception | None = None  # To be raised with the others.
        self._manifest: Manifest  # Without files, until they are written.

    @contextmanager
    def whole_or_gone(self) -> Iterator[None]:
        """Remove what was written when the block fails. Collective over all ranks when it fails by agreement."""
        try:
            yield
        except BaseException as problem:
            if self._ranks.is_main and self._staging is not None:
                self._storage.abandon(self._staging)
            if self._of_hooks is not None:
                self._storage.drop_hooks_files(self._of_hooks)
            if isinstance(problem, CheckpointError):
                self._ranks.gather(None)  # Every rank raises only after the files of this save are gone.
            raise

    def prepare(
        self,
        state: TrainingState,
        kept: WritePlan | None = None,
        info: Mapping[str, Any] | None = None,
        hooks: SaveHooks | None = None,
    ) -> WritePlan:
        """Collect the state and settle which rank writes what. Collective over all ranks; tensors are not copied.

        Args:
            state: what to write.
            kept: the plan of the save before, which is taken again where it fits on every rank.
            info: see :meth:`Saver.save`, also for ``hooks``.
            hooks: the script's.

        Returns:
            This save's plan.
        """
        ranks, topology = self._ranks, self._backend.topology
        skip_models = frozenset[int]()
        if hooks is not None:
            act = hooks
            staging = self._staging = _present(ranks.agree("make the folder", self._stage)[0])
            skip_models = ranks.agree(
                "run the save hooks", lambda: frozenset(act(self._folder_of_hooks(staging)))
            )[ranks.rank]
        found: list[tuple[Collected, Layout]] = []

        def offer() -> _Offer:
            collected = collect(state, topology, skip_models)
            found.append((collected, layout_of(collected.tensors)))
            marks = {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in collected.objects.items()}
            mine = ranks.world_size, found[0][1], collected.buffers
            fits = kept is not None and (kept.num_ranks, kept.layout, kept.buffers) == mine
            return _Offer(marks, kept.made_for if kept is not None and fits else "", self._stage())

        offers = ranks.agree("collect the state", offer)
        ((collected, layout),) = found
        self._staging = _present(offers[0].staging)
        if ranks.is_main:
            self._attempt(partial(_warn_about_differences, [each.marks for each in offers]))
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(collected.tensors)
        plan = kept
        if plan is None or {each.kept for each in offers} != {plan.made_for}:
            plan = make_plan(self._staging.data.name, layout, planner, collected.buffers, ranks)
        for file, items in plan.files.items():
            sources = []
            for item, chunk in items:
                dtype = cast("Any", item.tensor_data).properties.dtype
                produce = cast("Callable[[], Tensor]", partial(planner.resolve_data, item))
                sources.append(Source(chunk.key, dtype, chunk.shape, produce))
            self._files.append(PlannedFile(file, sources))
        if collected.rng is not None:
            tree, tensors = collected.rng
            sources = [Source.of(key, tensor) for key, tensor in tensors.items()]
            self._files.append(PlannedFile(_rng_file(topology.dp_rank), sources, {"tree": json.dumps(tree)}))
        self._manifest = Manifest(
            backend=name_of(self._backend),
            mesh=topology.mesh.sizes,
            world_size=topology.world_size,
            created=time.time(),
            libraries=library_versions(),
            info=dict(info or {}),
            counters=collected.counters,
            trainables=collected.trainables,
            objects=collected.objects,
            tensors=plan.tensors,
        )
        return plan

    def copy(self, buffer: HostBuffer) -> None:
        """Copy what this rank will write, so that training may change it. Not collective.

        No rank waits for another's copy; if one fails, :meth:`finish` raises on all.
        """
        self._attempt(lambda: buffer.copy(self._files))

    def _attempt(self, work: Callable[[], object]) -> None:
        """Run what one rank does for itself; :meth:`finish` raises its failure, on all ranks."""
        try:
            work()
        except Exception as problem:  # noqa: BLE001
            self._failure = problem

    def finish(self) -> None:
        """Write and commit. Collective over all ranks at the end of each of the two."""
        parts = self._ranks.agree("write its part of the checkpoint", self._write)
        self._ranks.agree("complete the checkpoint", lambda: self._complete(parts))

    def _folder_of_hooks(self, staging: Staging[Any]) -> Path:
        self._of_hooks = self._storage.hooks_folder(staging)
        return self._of_hooks

    def _stage(self) -> Staging[Any] | None:
        """Begin the save, on the main process. All ranks check that they can reach its storage."""
        self._storage.check_reachable(self.target)
        if self._ranks.is_main and self._staging is None:
            try:
                self._staging = self._storage.stage(self.target)
            except CheckpointError:
                raise
            except OSError as problem:
                raise CheckpointError(
                    f"{self.target} cannot be made: {problem.strerror or problem}",
                    cure="Name a folder that can be written to, or free some space.",
                ) from problem
        return self._staging

    def _write(self) -> dict[str, FileEntry]:
        """Write this rank's files; returns their entries by path below the checkpoint."""
        if self._failure is not None:
            raise self._failure
        staging = _present(self._staging)
        if self._of_hooks is not None:
            self._storage.take_hooks_files(staging, self._of_hooks)
        with full_disk_named(
            "could not write its part of the checkpoint",
            self.target.parent,
            self._storage.free_bytes(staging.data),
            "Free some space or save elsewhere; what was saved before is whole. "
            "ProjectConfiguration(total_limit=2) keeps the newest two and deletes older ones.",
            lambda: sum(source.num_bytes for file in self._files for source in file.sources),
        ):
            return self._write_files(staging.data)

    def _write_files(self, data: Folder) -> dict[str, FileEntry]:
        return {
            f"{data.name}/{file.name}": write_tensors(data / file.name, file.sources, file.metadata)
            for file in self._files
        }

    def _complete(self, parts: list[dict[str, FileEntry]]) -> None:
        """Check that all parts are written, write the manifest and commit the folder, on the main process."""
        if not self._ranks.is_main:
            return
        staging = _present(self._staging)
        files = {name: entry for part in parts for name, entry in sorted(part.items())}
        seen = self._storage.sizes(staging, files)
        for rank, part in enumerate(parts):
            for name, entry in part.items():
                if seen.get(name) != entry.size:
                    raise CheckpointError(
                        f"the main process does not see {name}, which rank {rank} wrote",
                        cure="All machines must share the storage of the checkpoint's folder, and only one run may "
                        "save there.",
                    )
        data = staging.data.name
        tensors = {}
        for name, planned in self._manifest.tensors.items():
            chunks = [Chunk(one.offsets, one.shape, f"{data}/{one.file}", one.key) for one in planned.chunks]
            tensors[name] = TensorEntry(planned.dtype, planned.shape, tuple(chunks), planned.sharded)
        rng = {at: f"{data}/{_rng_file(at)}" for at in range(self._backend.topology.dp_size)}
        rng = {at: name for at, name in rng.items() if name in files}
        self._storage.commit(staging, replace(self._manifest, tensors=tensors, files=files, rng=rng))


def _rng_file(coordinate: int) -> str:
    return f"rng-{coordinate:05d}.safetensors"


def _present(staging: Staging[Any] | None) -> Staging[Any]:
    assert staging is not None, "the main process has begun it"
    return staging


def _warn_about_differences(marks: list[dict[str, int]]) -> None:
    """Warn of objects whose state differs between ranks: that of the other ranks is lost."""
    for name, mark in marks[0].items():
        others = [rank for rank, each in enumerate(marks) if each.get(name) != mark]
        if others:
            warnings.warn(
                f"{name} has another state on rank {', '.join(map(str, others))} than on rank 0, whose state is saved",
                stacklevel=5,
            )


def library_versions() -> dict[str, str]:
    """Versions of the libraries that write, for the manifest."""
    found = {"python": platform.python_version()}
    for name in ("drivetrain", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


# ---- The saves of a run


@final
class HostBuffer:
    """Copies in host memory of what a rank writes; the memory is kept for the next save.

    Args:
        device: of the training; where it is not the CPU the copies are pinned, so that copying is fast.
    """

    def __init__(self, device: str) -> None:
        self._on_device = device != "cpu"
        self._copies: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: list[PlannedFile]) -> None:
        """Copy every tensor of these files, which then read the copies. They hold until the next call."""
        before, self._copies = self._copies, {}
        for index, file in enumerate(files):
            sources = []
            for source in file.sources:
                place = file.name, source.key
                kept = before.pop(place, None)
                if kept is None or (kept.dtype, tuple(kept.shape)) != (source.dtype, source.shape):
                    kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._on_device)
                self._copies[place] = kept.copy_(source.produce().detach(), non_blocking=self._on_device)
                sources.append(Source.of(source.key, kept))
            files[index] = replace(file, sources=sources)
        if self._on_device:
            torch.accelerator.synchronize()

    def release(self) -> None:
        """Free the memory."""
        self._copies.clear()


@final
class Saver:
    """Saves one run's checkpoints, one at a time: at once, or in a background thread.

    Call its methods from the main thread. The threads use their own process group, so that their messages never mix
    with those of the training.

    Args:
        backend: the started backend; for saves in the background its runtime is ``torch.distributed`` where it has
            several processes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = HostBuffer(backend.topology.device)
        self._plan: WritePlan | None = None  # Of the save before.
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._target: Folder | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        path: str | Folder,
        state: TrainingState,
        *,
        info: Mapping[str, Any] | None = None,
        hooks: SaveHooks | None = None,
        alone: bool = False,
    ) -> Folder:
        """Write a checkpoint. Collective over all ranks, which must share the file system.

        The folder appears whole or not at all; an older checkpoint at ``path`` stays whole until the new one is
        complete. Each tensor is written once, by one of the ranks that hold it; a rank needs the memory of one
        parameter more. The save before this one must have been waited for.

        Args:
            path: the checkpoint's folder, or its address; other files in it stay.
            state: what to write.
            info: plain JSON to note in the manifest; the main process's counts.
            hooks: called on every rank, before the state is collected, with the folder that will become ``path``; files
                it leaves there appear with the checkpoint, which neither lists nor checks them. Where ``path`` is
                remote it is a local folder, whose files are sent. Returns the indices of trainables whose ``model.*``
                tensors are left out, since it wrote them its own way.
            alone: only the main process calls this, on a backend that replicates; the random state of the others is
                lost.

        Returns:
            ``path``, made absolute.

        Raises:
            CheckpointError: on every rank, when any of them failed; nothing is left behind.
        """
        work = SaveWork(path, self._backend, Ranks(self._backend, alone=alone))
        with work.whole_or_gone():
            self._plan = work.prepare(state, self._plan, info, hooks)
            work.finish()
        return work.target

    def start(
        self,
        path: str | Folder,
        state: TrainingState,
        *,
        info: Mapping[str, Any] | None = None,
        hooks: SaveHooks | None = None,
        alone: bool = False,
        afterwards: Callable[[], object] | None = None,
    ) -> Folder:
        """Copy the state and begin to write it. Collective over all ranks, until the state is collected.

        The save before this one must have been waited for.

        Args:
            path: see :meth:`save`, also for ``state``, ``info`` and ``alone``.
            state: what to write.
            info: plain JSON.
            hooks: see :meth:`save`; called here, not in the thread.
            alone: only the main process calls this.
            afterwards: called by the main process's thread once the checkpoint is complete.

        Returns:
            ``path``, made absolute; the checkpoint appears there later.

        Raises:
            CheckpointError: on every rank, when any of them failed before the thread began.
        """
        assert self._thread is None, "the save before is waited for"
        # The group is unused until the thread begins.
        ranks = Ranks(self._backend, alone=alone, group=None if alone else self._own_group())
        work = SaveWork(path, self._backend, ranks)
        with work.whole_or_gone():
            self._plan = work.prepare(state, self._plan, info, hooks)
            work.copy(self._buffer)
        self._target = work.target
        # A thread that began at once would hold the interpreter lock for a switch interval, 5 ms.
        returned = threading.Event()
        # Not a daemon: a script that ends while it runs ends after it.
        self._thread = threading.Thread(
            target=self._run, args=(returned, work, ranks, afterwards), name="drivetrain-save"
        )
        self._thread.start()
        returned.set()
        return work.target

    def wait(self) -> Folder | None:
        """Wait until the current save is complete. Not collective, but the threads of all ranks wait for each other.

        Returns:
            Its folder; ``None`` when none ran.

        Raises:
            CheckpointError: it failed, on every rank; raised once. Complete checkpoints are untouched.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            what = failure.what if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
            raise CheckpointError(
                f"the save of {self._target} in the background failed: {what}",
                cure="Older checkpoints are unchanged. Remove the cause, and save again.",
            ) from failure
        return self._target

    def close(self) -> None:
        """Wait, then release memory and process group. Not collective. A failure is logged: the run is over."""
        try:
            self.wait()
        except CheckpointError as problem:
            logger.error("%s", problem)  # noqa: TRY400 (the sentence says it all; the traceback is the thread's)
        self._buffer.release()
        self._plan = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _own_group(self) -> Any:
        """A process group of all ranks for the thread. Collective over all ranks the first time."""
        if self._backend.topology.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", group_desc="drivetrain checkpoints")
        return self._group

    def _run(
        self, returned: threading.Event, work: SaveWork, ranks: Ranks, afterwards: Callable[[], object] | None
    ) -> None:
        returned.wait()
        try:
            with work.whole_or_gone():
                work.finish()
            if afterwards is not None:
                ranks.on_main("remove older checkpoints", afterwards)
        except BaseException as problem:  # noqa: BLE001  The main thread raises it at its next call.
            self._failure = problem
            if not threading.main_thread().is_alive():
                logger.error("the last save, of %s, failed after the script had ended: %s", self._target, problem)  # noqa: TRY400


def save(
    path: str | Folder,
    state: TrainingState,
    backend: Backend,
    *,
    info: Mapping[str, Any] | None = None,
    hooks: SaveHooks | None = None,
) -> Folder:
    """Write one checkpoint; see :meth:`Saver.save`. Collective over all ranks."""
    return Saver(backend).save(path, state, info=info, hooks=hooks)
