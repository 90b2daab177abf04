"""Read a checkpoint: manifest, integrity, comparison, and only then the first change to the run."""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.checkpoint.comparing import Differences, compare_groups, joined, judge
from drivetrain.checkpoint.files import check_file
from drivetrain.checkpoint.manifest import MANIFEST, Manifest, read_text, stored_name
from drivetrain.checkpoint.ranks import Ranks
from drivetrain.checkpoint.storage import DrivetrainReader, torch_dtype
from drivetrain.checkpoint.tensorfile import TensorFile, dtype_name
from drivetrain.checkpoint.tree import decode, tensor_keys
from drivetrain.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from drivetrain.backend import Backend, Trainable
    from drivetrain.checkpoint.state import TrainingState


def load(
    path: str | Path,
    state: TrainingState,
    backend: Backend,
    *,
    strict: bool = True,
    skip_models: Collection[int] = (),
) -> Manifest:
    """Read a checkpoint into a run of any backend and world size. Collective over all ranks.

    Nothing of the run is changed before every file was checked and everything was compared. Nothing is unpickled.

    Args:
        path: the checkpoint's folder.
        state: what to fill.
        backend: for collectives and this process's place.
        strict: names in the checkpoint and here must be the same; otherwise differences are passed over with a warning.
            Shapes and parameter groups must always fit.
        skip_models: indices of trainables whose ``model.*`` tensors are left as they are.

    Returns:
        The manifest; its ``info`` is what the save was given.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: a file is missing, truncated or altered.
        CheckpointMismatchError: the checkpoint is of another model, optimizer or script. All on every rank.
    """
    folder = Path(path).absolute()
    ranks = Ranks(backend)
    (text, *_) = ranks.agree("read the manifest", lambda: read_text(folder) if ranks.is_main else "")
    manifest = Manifest.from_json(ranks.broadcast(text), str(folder / MANIFEST))
    ranks.agree("check its share of the files", lambda: _check_share(folder, manifest, ranks))
    work = _Load(folder, manifest, state, backend, frozenset(skip_models))
    differences = joined(ranks.agree("compare the checkpoint", work.compare))
    passed_over = judge(differences, str(folder), strict=strict)
    work.remark_rng()
    if ranks.is_main:
        remarks = [f"strict=False passes over: {passed_over}"] if passed_over else []
        for sentence in remarks + work.remarks:
            warnings.warn(sentence, stacklevel=2)
    ranks.agree("read its tensors", work.fill)
    ranks.agree("take over the state", work.take_over)
    return manifest


def _check_share(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Check this rank's share of the files: largest first, each to the rank that has least to read."""
    loads = [0] * ranks.world_size
    for name, entry in sorted(manifest.files.items(), key=lambda one: (-one[1].size, one[0])):
        rank = loads.index(min(loads))
        loads[rank] += entry.size
        if rank == ranks.rank:
            check_file(folder, name, entry)


class _Load:
    """One rank's part of one load. Its methods run in the order written here; only the last one is collective."""

    def __init__(
        self, folder: Path, manifest: Manifest, state: TrainingState, backend: Backend, skip_models: frozenset[int]
    ) -> None:
        self._folder, self._manifest, self._state = folder, manifest, state
        self._topology, self._skip_models = backend.topology, skip_models
        self._templates: list[PortableState] = []
        self._targets: dict[str, Any] = {}  # What is to be filled, by stored name.
        self._aliases: dict[str, str] = {}  # Stored name wanted here: the stored name that it was tied to.
        self._rng: Any = None
        self.remarks: list[str] = []

    def compare(self) -> Differences:
        """Lay out what is to be filled and find what does not fit."""
        found = Differences(unused={name for name in self._manifest.tensors if name.startswith(("model", "optim"))})
        for index, trainable in enumerate(self._state.trainables):
            if index < len(self._manifest.trainables):
                self._compare_trainable(index, trainable, found)
            else:
                found.others.append(f"model {index} is prepared here, {len(self._manifest.trainables)} were saved")
        here, saved = set(self._state.objects), set(self._manifest.objects)
        found.missing.update(f"objects.{name}" for name in here - saved)
        found.unused.update(f"objects.{name}" for name in saved - here)
        self._lay_out(self._manifest.counters)
        for entry in self._manifest.trainables[: len(self._state.trainables)]:
            self._lay_out([entry["optimizers"], entry["extra"]])
        for name in sorted(here & saved):
            keys = {key for key, _ in tensor_keys(self._manifest.objects[name])}
            is_sharded = any(self._manifest.tensors[key].sharded for key in keys)
            self._lay_out(self._manifest.objects[name], self._state.objects[name].state_dict() if is_sharded else None)
        return found

    def fill(self) -> None:
        """Read every tensor that this rank needs, its own boxes only, and its random state."""
        tied = {name: self._manifest.tensors[first] for name, first in self._aliases.items()}
        reader = DrivetrainReader(
            self._folder, dataclasses.replace(self._manifest, tensors={**self._manifest.tensors, **tied})
        )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(self._targets, reader.read_metadata(), is_coordinator=self._topology.rank == 0)
        reader.read_data(planner.create_local_plan(), planner).wait()
        file = self._manifest.rng.get(self._topology.dp_rank)
        if self._state.rng is not None and file is not None:
            self._rng = _read_rng(self._folder / file)

    def take_over(self) -> None:
        """Hand everything to its owner; random state last, since owners may draw numbers. Collective where they are."""
        for index, (trainable, template) in enumerate(zip(self._state.trainables, self._templates, strict=True)):
            saved = self._manifest.trainables[index]
            filled = {
                own: self._targets[stored]
                for own in template.tensors
                if (stored := stored_name(own, index)) in self._targets
            }
            optimizers = decode(saved["optimizers"], self._fetch) if trainable.optimizers else []
            trainable.load_portable_state(PortableState(filled, optimizers, decode(saved["extra"], self._fetch)))
        for name, item in self._state.objects.items():
            if name in self._manifest.objects:
                item.load_state_dict(decode(self._manifest.objects[name], self._fetch))
        self._state.counters.update(decode(self._manifest.counters, self._fetch))
        if self._state.rng is not None and self._manifest.rng:
            if self._rng is not None:
                self._state.rng.restore(self._rng)
            else:
                self._state.rng.reseed(self._derived_seed(self._topology.dp_rank))

    def _compare_trainable(self, index: int, trainable: Trainable, found: Differences) -> None:
        saved, specs = self._manifest.trainables[index], self._manifest.specs(index)
        tied = saved["extra"].get("tied", {})
        origins = _tied_names(specs, tied)
        template = trainable.portable_template({**{own: specs[first] for own, first in origins.items()}, **specs})
        self._templates.append(template)
        left_out = {own for own in specs if own.startswith("model.") and index in self._skip_models}
        if not trainable.optimizers and any(own.startswith("optim.") for own in specs):
            left_out |= {own for own in specs if own.startswith("optim.")}
            self.remarks.append(f"the optimizer state of model {index} is left out: no optimizer is prepared with it")
        cast = []
        for own, target in template.tensors.items():
            first = own if own in specs else origins.get(own, own)
            stored = stored_name(own, index)
            if first in left_out or (own.startswith("model.") and index in self._skip_models):
                continue
            if first not in specs:
                found.missing.add(stored)
                continue
            found.unused.discard(stored_name(first, index))
            if tuple(target.shape) != specs[first].shape:
                saved_shape = list(specs[first].shape)
                found.shapes.append(f"{stored} is {saved_shape} in the checkpoint and {list(target.shape)} here")
                continue
            if dtype_name(target.dtype) != specs[first].dtype:
                cast.append(f"{stored} from {specs[first].dtype} to {dtype_name(target.dtype)}")
            self._targets[stored] = target
            if first != own:
                self._aliases[stored] = stored_name(first, index)
        found.unused -= {stored_name(own, index) for own in left_out}
        if cast:
            self.remarks.append(f"{len(cast)} tensor(s) change their dtype while loading, the first is {cast[0]}")
        if trainable.optimizers and not saved["optimizers"]:
            found.missing.add(f"optimizer state of model {index}")
        elif trainable.optimizers and template.optimizers:
            both = {**template.extra.get("tied", {}), **tied}
            ungrouped = saved["extra"].get("ungrouped", ())
            found.others += compare_groups(saved["optimizers"], template.optimizers, both, f"model {index}", ungrouped)

    def _lay_out(self, tree: Any, like: Any = None) -> None:
        """Make room for the tensors of encoded state: on the CPU, or sharded as they are now."""
        for key, present in tensor_keys(tree, like):
            entry = self._manifest.tensors[key]
            if isinstance(present, DTensor) and tuple(present.shape) == entry.shape:
                self._targets[key] = torch.empty_like(present)
            else:
                self._targets[key] = torch.empty(entry.shape, dtype=torch_dtype(key, entry.dtype))

    def _fetch(self, key: str) -> Tensor:
        tensor: Tensor = self._targets[key]
        return tensor

    def remark_rng(self) -> None:
        """Say what becomes of the random state where the checkpoint has none for a data-parallel coordinate."""
        if self._state.rng is None:
            return
        lacking = [at for at in range(self._topology.dp_size) if at not in self._manifest.rng]
        if lacking and not self._manifest.rng:
            self.remarks.append("the checkpoint holds no random state; the run goes on with its own")
        elif lacking:
            seeds = ", ".join(f"{at}: {self._derived_seed(at)}" for at in lacking)
            self.remarks.append(
                f"the checkpoint holds the random state of {len(self._manifest.rng)} data-parallel process(es); "
                f"the others are seeded from it ({seeds})"
            )

    def _derived_seed(self, coordinate: int) -> int:
        """A seed that depends on the checkpoint and the coordinate only."""
        first = self._manifest.files[self._manifest.rng[min(self._manifest.rng)]]
        return zlib.crc32(f"{first.crc32}/{coordinate}".encode())


def _tied_names(specs: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> dict[str, str]:
    """Further names under which saved tensors are known, by tying: ``{"model.head.weight": "model.embed.weight"}``."""
    aliases: dict[str, list[str]] = {}
    for alias, first in tied.items():
        aliases.setdefault(first, []).append(alias)
    names = {}
    for own in specs:
        kind, _, rest = own.partition(".")
        name = rest if kind == "model" else rest.rpartition(".")[0]
        for alias in aliases.get(name, ()):
            names[f"{kind}.{alias}{rest[len(name) :]}"] = own
    return names


def _read_rng(path: Path) -> Any:
    file = TensorFile(path)
    try:
        tree = json.loads(file.metadata["tree"])
    except (KeyError, ValueError) as problem:
        raise CheckpointCorruptError(f"{path.name} holds no random state", whose=str(path.parent)) from problem
    return decode(tree, file.copy)
