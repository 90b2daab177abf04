"""Load a checkpoint; one that cannot be loaded leaves the run unchanged.

A rank has no room for a second copy of its weights, so they cannot be read aside and exchanged, nor put back. Instead
all that can go wrong comes first: the checksum of every file, names and shapes, the header of every tensor that is
read, and everything but model and optimizer tensors is read, decoded and tried. What is changed by then (registered
objects, schedulers, loaders) is small and is taken back if any rank fails. Only then are the weights read over.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.checkpoint.comparing import Differences, compare_groups, joined, judge
from drivetrain.checkpoint.files import check_file
from drivetrain.checkpoint.manifest import MANIFEST, Manifest, read_text, stored_name
from drivetrain.checkpoint.ranks import Ranks
from drivetrain.checkpoint.storage import DrivetrainReader, torch_dtype
from drivetrain.checkpoint.tensorfile import TensorFile, dtype_name
from drivetrain.checkpoint.tree import decode, tensor_keys
from drivetrain.checkpoint.trying import check_words, remembered, set_extra_states
from drivetrain.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.checkpoint.state import Portable, Rng, TrainingState

LoadHooks = Callable[[Path], Collection[int]]


def load(
    path: str | Path,
    state: TrainingState,
    backend: Backend,
    *,
    strict: bool = True,
    hooks: LoadHooks | None = None,
) -> Manifest:
    """Read a checkpoint into a run of any backend and world size. Collective over all ranks.

    Nothing of the run is changed unless all of it was found sound on every rank. Nothing is unpickled.

    Args:
        path: the checkpoint's folder.
        state: what to fill.
        backend: for collectives and this process's place.
        strict: names in the checkpoint and here must be the same; otherwise differences are passed over with a warning.
            Shapes and parameter groups must always fit.
        hooks: called on every rank with the folder once its files were checked. Returns the indices of trainables whose
            ``model.*`` tensors are left as they are.

    Returns:
        The manifest; its ``info`` is what the save was given.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: a file is missing, truncated or altered.
        CheckpointMismatchError: the checkpoint is of another model, optimizer or script.
        CheckpointError: it does not make sense, or an object refused its state. All on every rank, with the run as it
            was. Only a file that cannot be read any more after it was checked, and an engine that refuses what fits,
            fail with the weights replaced; the message says so.
    """
    folder = Path(path).absolute()
    ranks = Ranks(backend)
    (text, *_) = ranks.agree("read the manifest", lambda: read_text(folder) if ranks.is_main else "")
    manifest = Manifest.from_json(ranks.broadcast(text), str(folder / MANIFEST))
    ranks.agree("check its share of the files", lambda: _check_share(folder, manifest, ranks))
    skipped = frozenset(hooks(folder)) if hooks is not None else frozenset[int]()
    work = _Load(folder, manifest, state, backend, skipped)
    differences = joined(ranks.agree("compare the checkpoint", work.compare))
    passed_over = judge(differences, str(folder), strict=strict)
    ranks.agree("make sense of the checkpoint", work.decode)
    work.remark_rng()
    if ranks.is_main:
        remarks = [f"strict=False passes over: {passed_over}"] if passed_over else []
        for sentence in remarks + work.remarks:
            warnings.warn(sentence, stacklevel=2)
    try:
        ranks.agree("take over the state of objects", work.take_over_objects)
    except BaseException:
        work.take_back()
        raise
    try:
        ranks.agree("read its tensors", work.fill)
        ranks.agree("take over the state", work.take_over)
    except CheckpointError as problem:
        work.take_back()
        raise type(problem)(
            f"{problem.what}; weights were replaced by then",
            whose=problem.whose,
            cure="Load another checkpoint, or start the run again: what is prepared now is of neither.",
        ) from problem
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
    """One rank's part of one load. Its methods run in the order written here."""

    def __init__(
        self, folder: Path, manifest: Manifest, state: TrainingState, backend: Backend, skip_models: frozenset[int]
    ) -> None:
        self._folder, self._manifest, self._state = folder, manifest, state
        self._topology, self._skip_models = backend.topology, skip_models
        self._templates: list[PortableState] = []
        self._targets: dict[str, Any] = {}  # Tensors of models and optimizers to be filled, by stored name.
        self._words: dict[str, Any] = {}  # New tensors for all other state.
        self._aliases: dict[str, str] = {}  # Stored name wanted here: the stored name that it was tied to.
        self._portable: list[PortableState] = []
        self._objects: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._rng: Any = None
        self._undo: list[Callable[[], object]] = []
        self.remarks: list[str] = []

    def compare(self) -> Differences:
        """Lay out what is to be filled and find what does not fit. Not collective."""
        found = Differences(unused={name for name in self._manifest.tensors if name.startswith(("model", "optim"))})
        for index, trainable in enumerate(self._state.trainables):
            if index < len(self._manifest.trainables):
                self._compare_trainable(index, trainable, found)
            else:
                found.others.append(f"{self._kind(index)} {index} is here, {len(self._manifest.trainables)} were saved")
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

    def _kind(self, index: int) -> str:
        return "average" if index >= len(self._state.trainables) - self._state.averages else "model"

    def _left_out(self, index: int, trainable: Portable, specs: Mapping[str, Any]) -> set[str]:
        """Names of saved tensors that nobody is to take."""
        left_out = {own for own in specs if own.startswith("model.") and index in self._skip_models}
        if not trainable.optimizers and any(own.startswith("optim.") for own in specs):
            left_out |= {own for own in specs if own.startswith("optim.")}
            self.remarks.append(f"the optimizer state of model {index} is left out: no optimizer is prepared with it")
        return left_out

    def _is_other_kind(self, index: int, saved: Mapping[str, Any], found: Differences) -> bool:
        kind = "average" if "average" in saved["extra"] else "model"
        if kind == self._kind(index):
            return False
        found.others.append(f"{self._kind(index)} {index} here is a {kind} in the checkpoint")
        self._templates.append(PortableState())
        return True

    def decode(self) -> None:
        """Read everything but what goes into models and optimizers, and look at the rest. Not collective."""
        reader, planner, plan = self._plan(self._targets)
        reader.check_data(plan)
        reader, planner, plan = self._plan(self._words)
        reader.read_data(plan, planner).wait()
        for index, (trainable, template) in enumerate(zip(self._state.trainables, self._templates, strict=True)):
            saved = self._manifest.trainables[index]
            tensors = {
                own: self._targets[stored]
                for own in template.tensors
                if (stored := stored_name(own, index)) in self._targets
            }
            optimizers = decode(saved["optimizers"], self._fetch) if trainable.optimizers else []
            portable = PortableState(tensors, optimizers, decode(saved["extra"], self._fetch))
            check_words(portable, template, trainable, f"model {index}")
            self._portable.append(portable)
        self._objects = {
            name: decode(self._manifest.objects[name], self._fetch)
            for name in self._state.objects
            if name in self._manifest.objects
        }
        self._counters = decode(self._manifest.counters, self._fetch)
        if not isinstance(self._counters, dict) or any(type(each) is not int for each in self._counters.values()):
            raise CheckpointCorruptError("the counters make no sense", whose=str(self._folder))
        file = self._manifest.rng.get(self._topology.dp_rank)
        if self._state.rng is not None and file is not None:
            self._rng = _read_rng(self._folder / file)
            _try_rng(self._state.rng, self._rng, file)

    def take_over_objects(self) -> None:
        """Give registered objects, schedulers and loaders their state. Collective where theirs is."""
        for trainable, portable in zip(self._state.trainables, self._portable, strict=True):
            self._undo += set_extra_states(trainable.module, portable.extra)
        for name, decoded in self._objects.items():
            item = self._state.objects[name]
            remember = self._state.remember.get(name)
            self._undo.append(remember() if remember is not None else remembered(item))
            item.load_state_dict(decoded)

    def take_back(self) -> None:
        """Undo :meth:`take_over_objects`, as far as it came. Collective where that is."""
        while self._undo:
            again = self._undo.pop()
            try:
                again()
            except Exception as problem:  # noqa: BLE001  The others are taken back all the same, and the cause is told.
                warnings.warn(f"an object does not take its own former state back: {problem!r}", stacklevel=3)

    def fill(self) -> None:
        """Read the weights: every tensor that this rank needs, its own boxes only. Not collective."""
        reader, planner, plan = self._plan(self._targets)
        reader.read_data(plan, planner).wait()

    def take_over(self) -> None:
        """Hand everything to its owner; random state last, since owners may draw numbers. Collective where they are."""
        for trainable, portable in zip(self._state.trainables, self._portable, strict=True):
            trainable.load_portable_state(portable)
        self._state.counters.update(self._counters)
        if self._state.rng is not None and self._manifest.rng:
            if self._rng is not None:
                self._state.rng.restore(self._rng)
            else:
                self._state.rng.reseed(self._derived_seed(self._topology.dp_rank))

    def _plan(self, targets: dict[str, Any]) -> tuple[DrivetrainReader, DefaultLoadPlanner, LoadPlan]:
        """What is read into these tensors, and from where."""
        tied = {name: self._manifest.tensors[first] for name, first in self._aliases.items()}
        reader = DrivetrainReader(
            self._folder, dataclasses.replace(self._manifest, tensors={**self._manifest.tensors, **tied})
        )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=self._topology.rank == 0)
        return reader, planner, planner.create_local_plan()

    def _compare_trainable(self, index: int, trainable: Portable, found: Differences) -> None:
        saved, specs = self._manifest.trainables[index], self._manifest.specs(index)
        tied = saved["extra"].get("tied", {})
        if self._is_other_kind(index, saved, found):
            return
        origins = _tied_names(specs, tied)
        template = trainable.portable_template({**{own: specs[first] for own, first in origins.items()}, **specs})
        self._templates.append(template)
        left_out = self._left_out(index, trainable, specs)
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
            if torch_dtype(stored, specs[first].dtype).is_complex != target.dtype.is_complex:
                found.others.append(f"{stored} is {specs[first].dtype} in the checkpoint and {target.dtype} here")
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
            if key.startswith(("model", "optim")):
                raise CheckpointCorruptError(f"{key} is named as the state of something else", whose=str(self._folder))
            if isinstance(present, DTensor) and tuple(present.shape) == entry.shape:
                self._words[key] = torch.empty_like(present)
            else:
                self._words[key] = torch.empty(entry.shape, dtype=torch_dtype(key, entry.dtype))

    def _fetch(self, key: str) -> Tensor:
        tensor: Tensor = self._words[key]
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


def _try_rng(rng: Rng, saved: Any, file: str) -> None:
    """Raise when the generators do not take this state; they are as they were afterwards."""
    before = rng.capture()
    try:
        rng.restore(saved)
    except Exception as problem:
        raise CheckpointCorruptError(
            f"{file} holds no random state: {type(problem).__name__}: {problem}".rstrip(".")
        ) from problem
    finally:
        rng.restore(before)


def _read_rng(path: Path) -> Any:
    file = TensorFile(path)
    try:
        tree = json.loads(file.metadata["tree"])
    except (KeyError, ValueError) as problem:
        raise CheckpointCorruptError(f"{path.name} holds no random state", whose=str(path.parent)) from problem
    return decode(tree, file.copy)
