"""Saves a run as a checkpoint, synchronously or from a copy in host memory by a background thread.

A save collects the state, plans which rank writes which tensors, writes, and commits; all ranks agree after each step
that none has failed. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.folder import commit, data_folder, stage
from drivetrain.checkpoint.manifest import Manifest, original_name, stored_names
from drivetrain.checkpoint.tensors import (
    CachedPlan,
    Layout,
    PlannedFile,
    Source,
    Written,
    common_plan,
    in_shards,
    index_tensors,
    layout_of,
    of_lowest_rank,
    plan_files,
    planner_of,
    write_files,
)
from drivetrain.checkpoint.tree import Encoder
from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import CheckpointError
from drivetrain.topology import DATA_AXES, Topology

if TYPE_CHECKING:
    from drivetrain.backend import Backend, PortableState, TensorSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

SaveHooks = Callable[[Path], Collection[int]]
Copy = Callable[[Sequence[PlannedFile]], list[PlannedFile]]

_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes in a host buffer: a cache line, and of every element size."""


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


@dataclass(frozen=True)
class Rng:
    """This process's random state.

    Args:
        capture: returns a tree (see :mod:`drivetrain.checkpoint.tree`) of this process's generators.
        restore: loads such a tree.
        reseed: seeds all generators from one number, for a process that the checkpoint knows nothing of.
    """

    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    reseed: Callable[[int], None]


@dataclass
class TrainingState:
    """A run's state.

    Args:
        trainables: the prepared models with their optimizers, in the same order on every rank and in every run; after
            them the averages of models.
        averages: how many of ``trainables`` are averages.
        objects: scheduler, loaders, the user's own, by a name that does not change; the same on every rank.
        counters: numbers of the run (optimizer steps, ...); a load replaces its values in place.
        rng: random state, kept per data-parallel coordinate; ``None`` keeps none.
        remember: for objects by name, where loading ``state_dict()`` again would not be enough: returns a function that
            takes the object back to what it is now.
    """

    trainables: Sequence[Portable] = ()
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    rng: Rng | None = None
    remember: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    averages: int = 0


# ---- Collecting the state


@dataclass(frozen=True)
class Collected:
    """The state that one rank contributes.

    Args:
        tensors: under their stored names; the live ones.
        of_one_rank: names of those that are buffers. Each rank's running statistics are its own, so that a checkpoint
            that took some from one rank and some from another would hold a state that no rank ever had.
        trainables: the encoded rest of each trainable.
        counters: encoded.
        objects: each object's state, encoded.
        rng: random state, encoded, with its tensors, on the first rank of each data-parallel coordinate.
    """

    tensors: dict[str, Tensor]
    of_one_rank: frozenset[str]
    trainables: tuple[Any, ...]
    counters: Any
    objects: dict[str, Any]
    rng: tuple[Any, dict[str, Tensor]] | None

    def marks(self) -> dict[str, int]:
        """A checksum of each object's state, which should be the same on every rank."""
        return {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in self.objects.items()}


def collect(state: TrainingState, topology: Topology, skip_models: Collection[int] = ()) -> Collected:
    """Collect and encode the whole state. Collective where an engine's ``portable_state`` is.

    Args:
        state: the run.
        topology: the job.
        skip_models: indices of trainables whose ``model.*`` tensors are left out.

    Raises:
        CheckpointError: state that no checkpoint can hold.
    """
    encoder = Encoder()
    tensors: dict[str, Tensor] = {}
    of_one_rank: set[str] = set()
    trainables = []
    for index, trainable in enumerate(state.trainables):
        portable = trainable.portable_state()
        parameters = {f"model.{original_name(name)}" for name, _ in trainable.module.named_parameters()}
        for own, stored in stored_names(portable.tensors, index).items():
            of_model = own.startswith("model.")
            if of_model and own not in parameters:
                of_one_rank.add(stored)
            if not (of_model and index in skip_models):
                tensors[stored] = portable.tensors[own]
        where = f"trainables.{index}"
        trainables.append(
            {
                "optimizers": encoder.encode(portable.optimizers, f"{where}.optimizers"),
                "extra": encoder.encode(portable.extra, f"{where}.extra"),
            }
        )
    counters = encoder.encode(state.counters, "counters")
    objects = {name: encoder.encode(item.state_dict(), f"objects.{name}") for name, item in state.objects.items()}
    # Replicated by contract; if they are not, words and numbers still come from one rank, the main process.
    is_main = topology.rank == 0
    tensors |= {name: tensor for name, tensor in encoder.tensors.items() if is_main or isinstance(tensor, DTensor)}
    rng = None
    coordinates = topology.mesh.coordinates(topology.rank)
    if state.rng is not None and not any(at for axis, at in coordinates.items() if axis not in DATA_AXES):
        numbers = Encoder()
        rng = numbers.encode(state.rng.capture(), "rng"), numbers.tensors
    return Collected(tensors, frozenset(of_one_rank), tuple(trainables), counters, objects, rng)


# ---- One save


def save(
    path: str | Path,
    state: TrainingState,
    backend: Backend,
    *,
    skip_models: Collection[int] = (),
    info: Mapping[str, Any] | None = None,
    hooks: SaveHooks | None = None,
    alone: bool = False,
) -> Path:
    """Write a checkpoint. Collective over all ranks, which must share the file system.

    The folder appears whole or not at all; an older checkpoint at ``path`` stays whole until the new one is complete.
    Each tensor is written once, by one of the ranks that hold it; a rank needs the memory of one parameter more.

    Args:
        path: the checkpoint's folder; other files in it stay.
        state: what to write.
        backend: for collectives and the job's shape.
        skip_models: indices of trainables whose ``model.*`` tensors are left out (a hook wrote them its own way).
        info: plain JSON to note in the manifest; the main process's counts.
        hooks: called on every rank, before the state is collected, with the folder that will become ``path``; files it
            leaves there appear with the checkpoint, which neither lists nor checks them. Returns further indices for
            ``skip_models``.
        alone: only the main process calls this, on a backend that replicates; the random state of the others is lost.

    Returns:
        ``path``, made absolute.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is left behind.
    """
    work = SaveWork(path, state, backend, Ranks(backend, alone=alone), skip_models, info)
    with work.whole_or_gone():
        work.begin(hooks)
        work.finish()
    return work.target


@dataclass(frozen=True)
class _Offer:
    """What a rank sends to the others before anything is written."""

    plan: SavePlan
    sharded: frozenset[str]
    of_one_rank: frozenset[str]
    marks: dict[str, int]
    staging: Path | None


class SaveWork:
    """One rank's part of one save: :meth:`begin` or :meth:`begin_beside`, then :meth:`finish`.

    All of it in :meth:`whole_or_gone`.

    Args:
        path: see :func:`save`, also for ``state``, ``backend``, ``skip_models`` and ``info``.
        state: what to write.
        backend: for the job's shape.
        ranks: all that save.
        skip_models: indices of trainables.
        info: plain JSON.
    """

    def __init__(
        self,
        path: str | Path,
        state: TrainingState,
        backend: Backend,
        ranks: Ranks,
        skip_models: Collection[int] = (),
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.target = Path(path).absolute()
        self._state, self._backend, self._ranks = state, backend, ranks
        self._skip_models, self._info = frozenset(skip_models), dict(info or {})
        self._staging: Path | None = None
        self._folder: Path | None = None
        self._collected: Collected | None = None
        self._offers: list[_Offer] = []
        self._planner: DefaultSavePlanner | None = None
        self._plan: CachedPlan | None = None
        self._layout: Layout = {}  # Known where the plan may be used again.
        self._files: list[PlannedFile] | None = None
        self._copy_failure: Exception | None = None

    @contextmanager
    def whole_or_gone(self) -> Iterator[None]:
        """Remove what was written when the block fails. Collective over all ranks when it fails by agreement."""
        try:
            yield
        except CheckpointError:
            self._abandon()
            self._ranks.gather(None)  # Every rank raises only after the files of this save are gone.
            raise
        except BaseException:
            self._abandon()
            raise

    def begin(self, hooks: SaveHooks | None) -> None:
        """Run the hooks and exchange what every rank could write. Collective over all ranks; tensors are not copied."""
        self._run_hooks(hooks)
        self._exchange_offers()

    def begin_beside(
        self, hooks: SaveHooks | None, copy: Copy, cached: CachedPlan | None
    ) -> CachedPlan | None:
        """As :meth:`begin`, and copy what this rank will write, so that training may change it.

        Collective over all ranks, but no rank waits for another's copy; if one fails, :meth:`finish` raises on all.

        Args:
            hooks: see :func:`save`.
            copy: gives files with copies of the sources.
            cached: the plan of the save before, taken again where it fits on every rank: they then exchange three
                numbers instead of plans, while they copy.

        Returns:
            This save's plan.
        """
        self._run_hooks(hooks)
        problem: Exception | None = None
        fits, mark = False, 0
        try:
            collected = self._collect()
            self._layout = layout_of(collected.tensors)
            fits = cached is not None and (cached.num_ranks, cached.layout) == (self._ranks.world_size, self._layout)
            mark = zlib.crc32(json.dumps(collected.marks()).encode())
        except Exception as caught:  # noqa: BLE001  Raised below, where the other ranks hear of it.
            problem = caught
        all_fit = self._ranks.ask_whether_same(fits, mark)
        if fits:
            self._plan = cached
            self._copy(copy)
        if not all_fit():
            self._plan = None
            self._exchange_offers(problem)
            self._copy(copy)
        # Nothing of the run is needed, nor kept alive, from here on.
        self._state, self._planner = TrainingState(), None
        self._collected = replace(_present(self._collected), tensors={})
        return self._plan

    def finish(self) -> None:
        """Write and commit. Collective over all ranks at the end of each of the two."""
        if self._folder is None:  # On all ranks alike: nothing was planned.
            self._folder = _present(self._ranks.agree("hear of the folder", lambda: self._staging)[0])
        folder = self._folder
        parts = self._ranks.agree("write its part of the checkpoint", lambda: self._write(folder))
        self._ranks.agree("complete the checkpoint", lambda: self._complete(folder, parts))

    def _run_hooks(self, hooks: SaveHooks | None) -> None:
        if hooks is None:
            return
        made = self._folder = _present(self._ranks.agree("make the folder", self._stage)[0])
        skipped = self._ranks.agree("run the save hooks", lambda: frozenset(hooks(made)))
        self._skip_models |= skipped[self._ranks.rank]

    def _exchange_offers(self, problem: Exception | None = None) -> None:
        """Tell all ranks what this one would write, or ``problem``. Collective over all ranks."""
        self._offers = self._ranks.agree("collect the state", lambda: self._offer(problem))
        self._folder = _present(self._offers[0].staging)

    def _copy(self, copy: Copy) -> None:
        """Copy; a failure is raised in :meth:`finish`, on all ranks."""
        self._copy_failure = None
        try:
            self._files = copy(self._share())
        except Exception as problem:  # noqa: BLE001
            self._copy_failure = problem

    def _stage(self) -> Path | None:
        """On the main process: make the staging folder, once."""
        if self._ranks.is_main and self._staging is None:
            self._staging = stage(self.target)
        return self._staging

    def _collect(self) -> Collected:
        """Collect the state, once, and make the folder; nothing is copied or written."""
        if self._collected is None:
            self._collected = collect(self._state, self._backend.topology, self._skip_models)
            self._planner = planner_of(self._collected.tensors)
            self._stage()
        return self._collected

    def _offer(self, problem: Exception | None) -> _Offer:
        """What this rank could write; raises an earlier failure."""
        if problem is not None:
            raise problem
        collected = self._collect()
        plan = _present(self._planner).create_local_plan()
        return _Offer(plan, in_shards(collected.tensors), collected.of_one_rank, collected.marks(), self._staging)

    def _share(self) -> list[PlannedFile]:
        """This rank's share of the common plan, and its random state. Nothing is copied yet."""
        collected, planner = _present(self._collected), _present(self._planner)
        if self._plan is None:
            if self._ranks.is_main:
                _warn_about_differences(self._offers)
            of_one_rank = frozenset[str]().union(*(offer.of_one_rank for offer in self._offers))
            plans = of_lowest_rank([offer.plan for offer in self._offers], of_one_rank)
            plan, metadata = common_plan(planner, plans, self._ranks.rank)
            sharded = frozenset[str]().union(*(offer.sharded for offer in self._offers))
            self._plan = CachedPlan(self._layout, len(self._offers), plan, metadata, sharded)
        files = plan_files(planner, self._plan.plan, f"tensors-{self._ranks.rank:05d}")
        if collected.rng is not None:
            tree, tensors = collected.rng
            sources = tuple(Source.of(key, value) for key, value in tensors.items())
            name = f"rng-{self._backend.topology.dp_rank:05d}.safetensors"
            files.append(PlannedFile(name, sources, metadata={"tree": json.dumps(tree)}))
        return files

    def _write(self, folder: Path) -> Written:
        """Write this rank's share."""
        if self._copy_failure is not None:
            raise self._copy_failure
        files = self._share() if self._files is None else self._files
        data = data_folder(folder)
        written = write_files(files, data)
        if _present(self._collected).rng is not None:
            written.rng[self._backend.topology.dp_rank] = f"{data.name}/{files[-1].name}"
        return written

    def _complete(self, folder: Path, parts: list[Written]) -> None:
        """On the main process: check that all parts are written, write the manifest, commit the folder."""
        if not self._ranks.is_main:
            return
        topology = self._backend.topology
        files = {name: entry for part in parts for name, entry in part.files.items()}
        for rank, part in enumerate(parts):
            for name, entry in part.files.items():
                file = folder / name
                if not file.exists() or file.stat().st_size != entry.size:
                    raise CheckpointError(
                        f"the main process does not see {name}, which rank {rank} wrote",
                        cure="All machines must share the file system of the checkpoint's folder.",
                    )
        collected, plan = _present(self._collected), _present(self._plan)
        manifest = Manifest(
            backend=self._backend.settings.name or type(self._backend).__name__,
            mesh=topology.mesh.sizes,
            world_size=topology.world_size,
            created=time.time(),
            libraries=library_versions(),
            info=self._info,
            counters=collected.counters,
            trainables=collected.trainables,
            objects=collected.objects,
            tensors=index_tensors(plan.metadata, plan.sharded, parts),
            files=dict(sorted(files.items())),
            rng={coordinate: name for part in parts for coordinate, name in part.rng.items()},
        )
        commit(folder, self.target, manifest)

    def _abandon(self) -> None:
        """Remove what a failed save wrote."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)  # Gone already when only the last sync failed.


def _present(value: T | None) -> T:
    assert value is not None, "an earlier phase of the save makes it"
    return value


def _warn_about_differences(offers: list[_Offer]) -> None:
    """Warn of objects whose state differs between ranks: that of the other ranks is lost."""
    for name, mark in offers[0].marks.items():
        others = [rank for rank, offer in enumerate(offers) if offer.marks.get(name) != mark]
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


# ---- Asynchronous saves


@final
class HostBuffer:
    """One block of host memory that holds what a rank writes; kept for the next save, and larger only when it must be.

    Args:
        device: of the training; where it is not the CPU the block is pinned, so that copies into it are fast.
    """

    def __init__(self, device: str) -> None:
        self._on_device = device != "cpu"
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Sequence[PlannedFile]) -> list[PlannedFile]:
        """Copy every tensor of these files; the files returned read the copies. They hold until the next call."""
        starts = [0]
        for file in files:
            for source in file.sources:
                starts.append(starts[-1] + -(-source.num_bytes // _ALIGNMENT) * _ALIGNMENT)
        if self._block.numel() < starts[-1]:
            self.release()  # Before the larger one is there: never both.
            self._block = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._on_device)
        at = iter(starts)
        kept = []
        for file in files:
            sources = []
            for source in file.sources:
                start = next(at)
                copy = self._block[start : start + source.num_bytes].view(source.dtype).view(source.shape)
                copy.copy_(source.produce().detach(), non_blocking=self._on_device)
                sources.append(Source(source.key, source.dtype, source.shape, copy.detach))
            kept.append(replace(file, sources=tuple(sources)))
        if self._on_device:
            torch.accelerator.synchronize()
        return kept

    def release(self) -> None:
        """Free the memory."""
        self._block = torch.empty(0, dtype=torch.uint8)


@final
class BackgroundSaver:
    """Saves one run's checkpoints in a background thread, one at a time. Call its methods from the main thread.

    The threads use their own process group, so that their messages never mix with those of the training.

    Args:
        backend: the started backend; its runtime is ``torch.distributed`` where it has several processes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = HostBuffer(backend.topology.device)
        self._plan: CachedPlan | None = None  # of the save before
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._target: Path | None = None
        self._failure: BaseException | None = None

    def start(
        self,
        path: str | Path,
        state: TrainingState,
        *,
        info: Mapping[str, Any] | None = None,
        hooks: SaveHooks | None = None,
        alone: bool = False,
        afterwards: Callable[[], object] | None = None,
    ) -> Path:
        """Copy the state and begin to write it. Collective over all ranks, until the copy is made; then it returns.

        The save before this one must have been waited for.

        Args:
            path: see :func:`drivetrain.checkpoint.save`, also for ``state``, ``info``, ``hooks`` and ``alone``.
            state: what to write.
            info: plain JSON for the manifest.
            hooks: called here, not in the thread.
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
        work = SaveWork(path, state, self._backend, ranks, info=info)
        with work.whole_or_gone():
            self._plan = work.begin_beside(hooks, self._buffer.copy, self._plan)
        self._target = work.target
        # A thread that began at once would hold the interpreter lock for a switch interval, 5 ms.
        returned = threading.Event()
        arguments = (returned, work, ranks, afterwards)
        # Not a daemon: a script that ends while it runs ends after it.
        self._thread = threading.Thread(target=self._run, args=arguments, name="drivetrain-save")
        self._thread.start()
        returned.set()
        return work.target

    def wait(self) -> Path | None:
        """Wait until the current save is complete; not collective, yet every rank's thread waits for the others'.

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
                cure="Older checkpoints are as they were. Cure the cause and save again.",
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
                act = afterwards
                ranks.agree("remove older checkpoints", lambda: act() if ranks.is_main else None)
        except BaseException as problem:  # noqa: BLE001  The main thread raises it at its next call.
            self._failure = problem
