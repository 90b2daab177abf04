"""Write a checkpoint: collect, plan, write, complete; after each step all ranks know whether all succeeded."""

from __future__ import annotations

import json
import platform
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.storage import (
    PlannedFile,
    Written,
    index_tensors,
    plan_files,
    plan_save,
    settle_plans,
    write_files,
)
from drivetrain.checkpoint.tensorfile import Source
from drivetrain.checkpoint.tree import Encoder
from drivetrain.errors import CheckpointError
from drivetrain.topology import DATA_AXES

if TYPE_CHECKING:
    from drivetrain.backend import Backend


def save(
    path: str | Path,
    state: TrainingState,
    backend: Backend,
    *,
    skip_models: Collection[int] = (),
    info: Mapping[str, Any] | None = None,
    hooks: Callable[[Path], Collection[int]] | None = None,
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
    marks: dict[str, int]
    staging: Path | None


class SaveWork:
    """One rank's part of one save: :meth:`begin`, perhaps :meth:`hold`, :meth:`finish`, all in :meth:`whole_or_gone`.

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

    def begin(self, ranks: Ranks, hooks: Callable[[Path], Collection[int]] | None = None) -> None:
        """Run the hooks and learn what every rank has to offer. Collective over ``ranks``; tensors are not copied."""
        if hooks is not None:
            made = _present(ranks.agree("make the folder", self._stage)[0])
            ranks.agree("run the save hooks", lambda: self._skip(hooks(made)))
        self._offers = ranks.agree("collect the state", self._collect)
        self._folder = _present(self._offers[0].staging)

    def hold(self, keep: Callable[[Sequence[PlannedFile]], list[PlannedFile]]) -> None:
        """Let ``keep`` copy what this rank will write, so that training may change it.

        Not collective: a rank waits for its own copy only. If it fails, :meth:`finish` tells all ranks.
        """
        try:
            self._files = keep(self._settle())
        except Exception as problem:  # noqa: BLE001  Raised in finish, where the other ranks hear of it.
            self._unheld = problem
        self._state = TrainingState()  # Nothing of the run is needed, nor kept alive, from here on.

    def finish(self, ranks: Ranks) -> None:
        """Write, and let the folder appear. Collective over ``ranks`` at the end of each of the two."""
        parts = ranks.agree("write its part of the checkpoint", self._write)
        ranks.agree("complete the checkpoint", lambda: self._complete(parts))

    def _stage(self) -> Path | None:
        """On the main process: make the staging folder, once."""
        if self._rank == 0 and self._staging is None:
            self._staging = stage(self.target)
        return self._staging

    def _skip(self, models: Collection[int]) -> None:
        """Leave out these models too."""
        self._skip_models |= frozenset(models)

    def _collect(self) -> _Offer:
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
        self._stage()
        sharded = frozenset(name for name, tensor in tensors.items() if isinstance(tensor, DTensor))
        marks = {name: zlib.crc32(json.dumps(tree).encode()) for name, tree in self._objects.items()}
        return _Offer(plan, sharded, marks, self._staging)

    def _settle(self) -> list[PlannedFile]:
        """This rank's share of what all offered, and its random state. Nothing is copied yet."""
        if self._rank == 0:
            _warn_about_differences(self._offers)
        plan, self._metadata = settle_plans(self._planner, [offer.plan for offer in self._offers], self._rank)
        data = data_folder(self._folder).name
        files = plan_files(self._planner, plan, f"{data}/tensors-{self._rank:05d}")
        if self._rng is not None:
            tree, tensors = self._rng
            sources = tuple(Source.of(key, value) for key, value in tensors.items())
            name = f"{data}/rng-{self._backend.topology.dp_rank:05d}.safetensors"
            files.append(PlannedFile(name, sources, metadata={"tree": json.dumps(tree)}))
        return files

    def _write(self) -> Written:
        """Write this rank's share."""
        if self._unheld is not None:
            raise self._unheld
        files = self._settle() if self._files is None else self._files
        written = write_files(files, self._folder)
        if self._rng is not None:
            written.rng[self._backend.topology.dp_rank] = files[-1].name
        return written

    def _complete(self, parts: list[Written]) -> None:
        """On the main process: check that all parts are here, write the manifest, let the folder appear."""
        if self._rank != 0:
            return
        topology = self._backend.topology
        files = {name: entry for part in parts for name, entry in part.files.items()}
        for rank, part in enumerate(parts):
            for name, entry in part.files.items():
                file = self._folder / name
                if not file.exists() or file.stat().st_size != entry.size:
                    raise CheckpointError(
                        f"the main process does not see {name}, which rank {rank} wrote",
                        cure="All machines must share the file system of the checkpoint's folder.",
                    )
        sharded = {name for offer in self._offers for name in offer.sharded}
        manifest = Manifest(
            backend=type(self._backend).__name__,
            mesh=topology.mesh.sizes,
            world_size=topology.world_size,
            created=time.time(),
            libraries=library_versions(),
            info=self._info,
            counters=self._counters,
            trainables=tuple(self._trainables),
            objects=self._objects,
            tensors=index_tensors(self._metadata, sharded, parts),
            files=dict(sorted(files.items())),
            rng={coordinate: name for part in parts for coordinate, name in part.rng.items()},
        )
        commit(self._folder, self.target, manifest)

    def _abandon(self) -> None:
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


def library_versions() -> dict[str, str]:
    """What writes, for the manifest."""
    found = {"python": platform.python_version()}
    for name in ("drivetrain", "torch", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
