"""Write a checkpoint: collect, plan, write and complete, with an agreement of all ranks after each step."""

from __future__ import annotations

import json
import platform
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.folder import commit, data_folder, stage
from drivetrain.checkpoint.manifest import Manifest, original_name, stored_name
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.storage import (
    PlanMemory,
    PlannedFile,
    Settled,
    Written,
    in_shards,
    index_tensors,
    layout_of,
    of_lowest_rank,
    plan_files,
    planner_of,
    settle_plans,
    write_files,
)
from drivetrain.checkpoint.tensorfile import Source
from drivetrain.checkpoint.tree import Encoder
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError
from drivetrain.topology import DATA_AXES, Topology

if TYPE_CHECKING:
    from drivetrain.backend import Backend

# ---- Collect a run's state as named tensors and JSON values, without copying

@dataclass(frozen=True)
class Collected:
    """What one rank has to say.

    Args:
        tensors: under their stored names; the live ones.
        of_one_rank: names of those that are buffers. Each rank's running statistics are its own, so that a checkpoint
            that took some from one rank and some from another would hold a state that no rank ever had.
        trainables: the encoded rest of each trainable.
        counters: encoded.
        objects: each object's state, encoded.
        rng: this coordinate's random state, encoded, with its tensors; ``None`` on ranks that do not save one.
    """

    tensors: dict[str, Tensor]
    of_one_rank: frozenset[str]
    trainables: tuple[Any, ...]
    counters: Any
    objects: dict[str, Any]
    rng: tuple[Any, dict[str, Tensor]] | None

    def marks(self) -> dict[str, int]:
        """A checksum of each object's state; that should be the same on every rank."""
        return {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in self.objects.items()}


def collect(state: TrainingState, topology: Topology, skip_models: Collection[int] = ()) -> Collected:
    """Put the whole state into the words of the format. Collective where an engine's ``portable_state`` is.

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
        of_one_rank |= {
            stored_name(own, index) for own in portable.tensors if own.startswith("model.") and own not in parameters
        }
        for own, tensor in portable.tensors.items():
            if not (own.startswith("model.") and index in skip_models):
                tensors[stored_name(own, index)] = tensor
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
    tensors.update(
        (name, tensor)
        for name, tensor in encoder.tensors.items()
        if topology.rank == 0 or isinstance(tensor, DTensor)
    )
    rng = _capture_rng(state, topology)
    return Collected(tensors, frozenset(of_one_rank), tuple(trainables), counters, objects, rng)


def _capture_rng(state: TrainingState, topology: Topology) -> tuple[Any, dict[str, Tensor]] | None:
    """Random state, on the first rank of each data-parallel coordinate."""
    place = topology.mesh.coordinates(topology.rank)
    if state.rng is None or any(at for axis, at in place.items() if axis not in DATA_AXES):
        return None
    encoder = Encoder()
    return encoder.encode(state.rng.capture(), "rng"), encoder.tensors


# ---- Write a checkpoint: collect, plan, write and complete, with an agreement of all ranks after each step

T = TypeVar("T")

SaveHooks = Callable[[Path], Collection[int]]
Keep = Callable[[Sequence[PlannedFile]], list[PlannedFile]]


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
    work = SaveWork(Path(path).absolute(), state, backend, frozenset(skip_models), dict(info or {}))
    ranks = Ranks(backend, alone=alone)
    with work.whole_or_gone(ranks):
        work.begin(ranks, hooks)
        work.finish(ranks)
    return work.target


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before anything is written."""

    plan: SavePlan
    sharded: frozenset[str]
    of_one_rank: frozenset[str]
    marks: dict[str, int]
    staging: Path | None


class SaveWork:
    """One rank's part of one save: :meth:`begin` or :meth:`begin_beside`, then :meth:`finish`.

    All of it in :meth:`whole_or_gone`.

    Args:
        target: the checkpoint's folder, absolute.
        state: what to write.
        backend: for the job's shape.
        skip_models: see :func:`save`.
        info: see :func:`save`.
    """

    def __init__(
        self, target: Path, state: TrainingState, backend: Backend, skip_models: frozenset[int], info: dict[str, Any]
    ) -> None:
        self.target = target
        self._state, self._backend = state, backend
        self._skip_models, self._info = skip_models, info
        self._rank = backend.topology.rank
        self._staging: Path | None = None
        self._folder: Path | None = None
        self._collected: Collected | None = None
        self._offers: list[_Offer] = []
        self._settled: Settled | None = None
        self._files: list[PlannedFile] | None = None
        self._unheld: Exception | None = None

    @contextmanager
    def whole_or_gone(self, ranks: Ranks) -> Iterator[None]:
        """Remove what was written when the block fails. Collective over ``ranks`` when it fails by agreement."""
        try:
            yield
        except CheckpointError:
            self._abandon()
            ranks.gather(None)  # Everyone raises; whoever looks at the disk then finds nothing of this save.
            raise
        except BaseException:
            self._abandon()
            raise

    def begin(self, ranks: Ranks, hooks: SaveHooks | None = None) -> None:
        """Run the hooks and learn what every rank has to offer. Collective over ranks; tensors are not copied."""
        self._run_hooks(ranks, hooks)
        self._tell(ranks)

    def begin_beside(self, ranks: Ranks, hooks: SaveHooks | None, keep: Keep, plans: PlanMemory) -> None:
        """The same, and let ``keep`` copy what this rank will write, so that training may change it.

        Collective over ``ranks``, but nobody waits for another's copy; if one fails, :meth:`finish` tells all ranks.

        Args:
            ranks: all that save.
            hooks: see :func:`save`.
            keep: copies the sources of these files.
            plans: the plan of the save before is taken again where it fits on every rank: they then exchange three
                numbers instead of plans, while they copy. This save's plan is put there.
        """
        self._run_hooks(ranks, hooks)
        problem: Exception | None = None
        fits, mark = False, 0
        try:
            collected = self._collect()
            fits = plans.fits(layout_of(collected.tensors), ranks.world_size)
            mark = zlib.crc32(json.dumps(collected.marks()).encode())
        except Exception as caught:  # noqa: BLE001  Raised below, where the other ranks hear of it.
            problem = caught
        all_fit = ranks.ask_whether_same(fits, mark)
        if fits:
            self._settled = plans.last
            self._hold(keep)
        if not all_fit():
            self._settled = None
            self._tell(ranks, problem)
            self._hold(keep)
        plans.last = self._settled
        # Nothing of the run is needed, nor kept alive, from here on.
        self._state = TrainingState()
        self._collected = replace(_present(self._collected), tensors={})

    def finish(self, ranks: Ranks) -> None:
        """Write, and let the folder appear. Collective over ``ranks`` at the end of each of the two."""
        if self._folder is None:  # On all ranks alike: nothing was planned.
            self._folder = _present(ranks.agree("hear of the folder", lambda: self._staging)[0])
        folder = self._folder
        parts = ranks.agree("write its part of the checkpoint", lambda: self._write(folder))
        ranks.agree("complete the checkpoint", lambda: self._complete(folder, parts))

    def _run_hooks(self, ranks: Ranks, hooks: SaveHooks | None) -> None:
        if hooks is None:
            return
        made = self._folder = _present(ranks.agree("make the folder", self._stage)[0])
        ranks.agree("run the save hooks", lambda: self._skip(hooks(made)))

    def _tell(self, ranks: Ranks, problem: Exception | None = None) -> None:
        """Exchange what every rank would write, or ``problem``. Collective over ``ranks``."""
        self._offers = ranks.agree("collect the state", lambda: self._offer(problem))
        self._folder = _present(self._offers[0].staging)

    def _hold(self, keep: Keep) -> None:
        """Copy; a failure is raised in :meth:`finish`, where the other ranks hear of it."""
        self._unheld = None
        try:
            self._files = keep(self._settle())
        except Exception as problem:  # noqa: BLE001
            self._unheld = problem

    def _stage(self) -> Path | None:
        """On the main process: make the staging folder, once."""
        if self._rank == 0 and self._staging is None:
            self._staging = stage(self.target)
        return self._staging

    def _skip(self, models: Collection[int]) -> None:
        """Leave out these models too."""
        self._skip_models |= frozenset(models)

    def _collect(self) -> Collected:
        """Put the state into words, once, and make the folder; nothing is copied or written."""
        if self._collected is None:
            self._collected = collect(self._state, self._backend.topology, self._skip_models)
            self._stage()
        return self._collected

    def _offer(self, problem: Exception | None) -> _Offer:
        """What this rank would write; raises what went wrong before."""
        if problem is not None:
            raise problem
        collected = self._collect()
        plan = planner_of(collected.tensors).create_local_plan()
        sharded = frozenset(name for name, tensor in collected.tensors.items() if in_shards(tensor))
        return _Offer(plan, sharded, collected.of_one_rank, collected.marks(), self._staging)

    def _settle(self) -> list[PlannedFile]:
        """This rank's share of what all offered, and its random state. Nothing is copied yet."""
        collected = _present(self._collected)
        planner = planner_of(collected.tensors)
        if self._settled is None:
            if self._rank == 0:
                _warn_about_differences(self._offers)
            of_one_rank = frozenset[str]().union(*(offer.of_one_rank for offer in self._offers))
            plans = of_lowest_rank([offer.plan for offer in self._offers], of_one_rank)
            plan, metadata = settle_plans(planner, plans, self._rank)
            sharded = frozenset[str]().union(*(offer.sharded for offer in self._offers))
            self._settled = Settled(layout_of(collected.tensors), len(self._offers), plan, metadata, sharded)
        files = plan_files(planner, self._settled.plan, f"tensors-{self._rank:05d}")
        if collected.rng is not None:
            tree, tensors = collected.rng
            sources = tuple(Source.of(key, value) for key, value in tensors.items())
            name = f"rng-{self._backend.topology.dp_rank:05d}.safetensors"
            files.append(PlannedFile(name, sources, metadata={"tree": json.dumps(tree)}))
        return files

    def _write(self, folder: Path) -> Written:
        """Write this rank's share."""
        if self._unheld is not None:
            raise self._unheld
        files = self._settle() if self._files is None else self._files
        data = data_folder(folder)
        written = write_files(files, data)
        if _present(self._collected).rng is not None:
            written.rng[self._backend.topology.dp_rank] = f"{data.name}/{files[-1].name}"
        return written

    def _complete(self, folder: Path, parts: list[Written]) -> None:
        """On the main process: check that all parts are here, write the manifest, let the folder appear."""
        if self._rank != 0:
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
        collected, settled = _present(self._collected), _present(self._settled)
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
            tensors=index_tensors(settled.metadata, settled.sharded, parts),
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
    """Say which objects are not the same everywhere: their state on the other ranks is lost."""
    for name, mark in offers[0].marks.items():
        others = [rank for rank, offer in enumerate(offers) if offer.marks.get(name) != mark]
        if others:
            warnings.warn(
                f"{name} has another state on rank {', '.join(map(str, others))} than on rank 0, whose state is saved",
                stacklevel=5,
            )


def library_versions() -> dict[str, str]:
    """What writes, for the manifest."""
    found = {"python": platform.python_version()}
    for name in ("drivetrain", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

