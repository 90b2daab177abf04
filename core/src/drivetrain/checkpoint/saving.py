"""Write a checkpoint: collect, plan, write, complete; after each step all ranks know whether all succeeded."""

from __future__ import annotations

import json
import platform
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.files import commit, data_folder, stage
from drivetrain.checkpoint.manifest import Manifest, stored_name
from drivetrain.checkpoint.ranks import Ranks
from drivetrain.checkpoint.storage import Written, index_tensors, plan_save, settle_plans, write_plan
from drivetrain.checkpoint.tensorfile import Source, write_tensors
from drivetrain.checkpoint.tree import Encoder
from drivetrain.errors import CheckpointError
from drivetrain.topology import DATA_AXES

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.checkpoint.state import TrainingState


def save(
    path: str | Path,
    state: TrainingState,
    backend: Backend,
    *,
    skip_models: Collection[int] = (),
    info: Mapping[str, Any] | None = None,
    hooks: Callable[[Path], Collection[int]] | None = None,
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

    Returns:
        ``path``, made absolute.

    Raises:
        CheckpointError: on every rank, when any of them failed; nothing is left behind.
    """
    target = Path(path).absolute()
    ranks = Ranks(backend)
    work = _Save(target, state, backend, frozenset(skip_models), dict(info or {}))
    try:
        if hooks is not None:
            made = _present(ranks.agree("make the folder", work.stage)[0])
            ranks.agree("run the save hooks", lambda: work.skip(hooks(made)))
        offers = ranks.agree("collect the state", work.collect)
        staging = _present(offers[0].staging)
        parts = ranks.agree("write its part of the checkpoint", lambda: work.write(offers, staging))
        ranks.agree("complete the checkpoint", lambda: work.complete(offers, parts, staging))
    except CheckpointError:
        work.abandon()
        ranks.gather(None)  # Everyone raises; whoever looks at the disk then finds nothing of this save.
        raise
    except BaseException:
        work.abandon()
        raise
    return target


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before anything is written."""

    plan: SavePlan
    sharded: frozenset[str]
    marks: dict[str, int]
    staging: Path | None


class _Save:
    """One rank's part of one save. Its methods run in the order written here; none is collective."""

    def __init__(
        self, target: Path, state: TrainingState, backend: Backend, skip_models: frozenset[int], info: dict[str, Any]
    ) -> None:
        self._target, self._state, self._backend = target, state, backend
        self._skip_models, self._info = skip_models, info
        self._rank = backend.topology.rank
        self._staging: Path | None = None

    def stage(self) -> Path | None:
        """On the main process: make the staging folder, once."""
        if self._rank == 0 and self._staging is None:
            self._staging = stage(self._target)
        return self._staging

    def skip(self, models: Collection[int]) -> None:
        """Leave out these models too."""
        self._skip_models |= frozenset(models)

    def collect(self) -> _Offer:
        """Put the whole state into the words of the format. Nothing is copied; a folder is made, nothing written."""
        encoder = Encoder()
        tensors: dict[str, Tensor] = {}
        self._trainables = []
        for index, trainable in enumerate(self._state.trainables):
            portable = trainable.portable_state()
            for own, tensor in portable.tensors.items():
                if not (own.startswith("model.") and index in self._skip_models):
                    tensors[stored_name(own, index)] = tensor
            where = f"trainables.{index}"
            self._trainables.append(
                {
                    "optimizers": encoder.encode(portable.optimizers, f"{where}.optimizers"),
                    "extra": encoder.encode(portable.extra, f"{where}.extra"),
                }
            )
        self._counters = encoder.encode(self._state.counters, "counters")
        self._objects = {
            name: encoder.encode(item.state_dict(), f"objects.{name}") for name, item in self._state.objects.items()
        }
        # Replicated by contract; if they are not, words and numbers still come from one rank, the main process.
        tensors.update(
            (name, tensor) for name, tensor in encoder.tensors.items() if self._rank == 0 or isinstance(tensor, DTensor)
        )
        self._rng = self._capture_rng()
        self._planner, plan = plan_save(tensors)
        self.stage()
        sharded = frozenset(name for name, tensor in tensors.items() if isinstance(tensor, DTensor))
        marks = {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in self._objects.items()}
        return _Offer(plan, sharded, marks, self._staging)

    def write(self, offers: list[_Offer], staging: Path) -> Written:
        """Write this rank's share of what all offered, and its random state."""
        if self._rank == 0:
            _warn_about_differences(offers)
        plan, self._metadata = settle_plans(self._planner, [offer.plan for offer in offers], self._rank)
        data = data_folder(staging)
        written = write_plan(self._planner, plan, staging, f"{data.name}/tensors-{self._rank:05d}")
        if self._rng is not None:
            tree, tensors = self._rng
            name = f"{data.name}/rng-{self._backend.topology.dp_rank:05d}.safetensors"
            sources = [Source.of(key, value) for key, value in tensors.items()]
            written.files[name] = write_tensors(staging / name, sources, {"tree": json.dumps(tree)})
            written.rng[self._backend.topology.dp_rank] = name
        return written

    def complete(self, offers: list[_Offer], parts: list[Written], staging: Path) -> None:
        """On the main process: check that all parts are here, write the manifest, let the folder appear."""
        if self._rank != 0:
            return
        topology = self._backend.topology
        files = {name: entry for part in parts for name, entry in part.files.items()}
        for rank, part in enumerate(parts):
            for name, entry in part.files.items():
                file = staging / name
                if not file.exists() or file.stat().st_size != entry.size:
                    raise CheckpointError(
                        f"the main process does not see {name}, which rank {rank} wrote",
                        cure="All machines must share the file system of the checkpoint's folder.",
                    )
        sharded = {name for offer in offers for name in offer.sharded}
        manifest = Manifest(
            backend=type(self._backend).__name__,
            mesh=topology.mesh.sizes,
            world_size=topology.world_size,
            created=time.time(),
            libraries=_libraries(),
            info=self._info,
            counters=self._counters,
            trainables=tuple(self._trainables),
            objects=self._objects,
            tensors=index_tensors(self._metadata, sharded, parts),
            files=dict(sorted(files.items())),
            rng={coordinate: name for part in parts for coordinate, name in part.rng.items()},
        )
        commit(staging, self._target, manifest)

    def abandon(self) -> None:
        """Remove what a failed save wrote."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)  # Gone already when only the last sync failed.

    def _capture_rng(self) -> tuple[Any, dict[str, Tensor]] | None:
        """Random state, on the first rank of each data-parallel coordinate."""
        topology = self._backend.topology
        place = topology.mesh.coordinates(topology.rank)
        if self._state.rng is None or any(at for axis, at in place.items() if axis not in DATA_AXES):
            return None
        encoder = Encoder()
        return encoder.encode(self._state.rng.capture(), "rng"), encoder.tensors


def _present(staging: Path | None) -> Path:
    assert staging is not None, "the main process makes the staging folder"
    return staging


def _warn_about_differences(offers: list[_Offer]) -> None:
    """Say which objects are not the same everywhere: their state on the other ranks is lost."""
    for name, mark in offers[0].marks.items():
        others = [rank for rank, offer in enumerate(offers) if offer.marks.get(name) != mark]
        if others:
            warnings.warn(
                f"{name} has another state on rank {', '.join(map(str, others))} than on rank 0, whose state is saved",
                stacklevel=5,
            )


def _libraries() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("drivetrain", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
