"""Loads a checkpoint; a checkpoint that cannot be loaded leaves the run unchanged.

A rank has no memory for a second copy of its weights, so they can be neither swapped nor restored. Instead everything
is checked first: the checksum of every file, names and shapes, and the header of every tensor; all state but the
tensors of models and optimizers is read, decoded and loaded. What has changed by then (registered objects,
schedulers, loaders) is small and is restored if any rank fails. Only then are the weights overwritten.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.checkpoint.manifest import MANIFEST, Manifest, read_text, stored_name
from drivetrain.checkpoint.remote import Folder, folder_of
from drivetrain.checkpoint.storage import check_file, storage_of
from drivetrain.checkpoint.tensors import DrivetrainReader, TensorFile, dtype_name, torch_dtype
from drivetrain.checkpoint.tree import Encoder, decode, tensor_keys
from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.rng import capture_rng, restore_rng, script_draws_apart, seed_all
from drivetrain.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from drivetrain.parameter_names import original_name

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.checkpoint.saver import Portable, TrainingState

logger = logging.getLogger(__name__)

# ---- Comparing checkpoint and run

_SHOWN = 6  # Names in one sentence; a wrong model has hundreds.


@dataclass
class Differences:
    """Differences between checkpoint and run that one rank found.

    Args:
        missing: needed here, not in the checkpoint.
        unused: in the checkpoint, not needed here.
        shapes: sentences about tensors of another shape.
        others: further sentences; loading cannot go on with any of these or of ``shapes``, strict or not.
    """

    missing: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    shapes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def joined(found: Sequence[Differences]) -> Differences:
    """All ranks' differences as one: a tensor is unused only if no rank needs it."""
    return Differences(
        missing=set().union(*(one.missing for one in found)),
        unused=set.intersection(*(one.unused for one in found)),
        shapes=list(dict.fromkeys(sentence for one in found for sentence in one.shapes)),
        others=list(dict.fromkeys(sentence for one in found for sentence in one.others)),
    )


def judge(differences: Differences, where: str, *, strict: bool) -> str:
    """Raise when the checkpoint does not fit.

    Args:
        differences: of all ranks.
        where: the checkpoint's folder.
        strict: missing and unused names count too.

    Returns:
        The sentence about names that were passed over, empty when there are none.

    Raises:
        CheckpointMismatchError: names every kind of difference at once.
    """
    hard = [*differences.others]
    if differences.shapes:
        hard.append("other shapes: " + _list(differences.shapes))
    soft = []
    if differences.missing:
        soft.append("missing in the checkpoint: " + _list(_hinted(differences.missing, differences.unused)))
    if differences.unused:
        soft.append("in the checkpoint but not here: " + _list(sorted(differences.unused)))
    if hard or (strict and soft):
        raise CheckpointMismatchError(
            "the checkpoint does not fit what is prepared: " + "; ".join(soft + hard),
            whose=where,
            cure="Prepare the same models, optimizers and registered objects in the same order as when it was saved"
            + (", or pass strict=False to leave out the names that differ." if not hard else "."),
        )
    return "; ".join(soft)


def compare_groups(
    saved: Any, here: Any, tied: Mapping[str, str], what: str, ungrouped: Collection[str] = ()
) -> list[str]:
    """Sentences about optimizers and parameter groups that differ; empty when they fit.

    Groups are the same when they hold the same parameters, in any order, and stand at the same position: schedulers
    address them by position.

    Args:
        saved: list of optimizers, each a list of groups with ``"params"`` (names).
        here: the same of what is prepared.
        tied: first name of each other name of a tied parameter, on both sides.
        what: begins the sentences, e.g. ``"model 0"``.
        ungrouped: parameters of which the checkpoint does not know whether they were in a group; they do not count.
    """
    if len(saved) != len(here):
        return [f"{what} was saved with {len(saved)} optimizer(s) and has {len(here)} here"]
    sentences = []
    for number, (old, new) in enumerate(zip(saved, here, strict=True)):
        before = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in old]
        after = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in new]
        if before == after:
            continue
        where = f"optimizer {number} of {what}"
        if len(before) == len(after) and all(group in after for group in before):
            sentences.append(f"{where} has its parameter groups in another order")
        elif set().union(*before) == set().union(*after):
            moved = {name for one, two in zip(before, after, strict=False) for name in one ^ two}
            sentences.append(
                f"{where} has {len(after)} parameter group(s) where {len(before)} were saved, "
                f"differing in {_list(sorted(moved))}"
            )
        else:
            gone, come = set().union(*before) - set().union(*after), set().union(*after) - set().union(*before)
            parts = [f"only in the checkpoint: {_list(sorted(gone))}"] if gone else []
            parts += [f"only here: {_list(sorted(come))}"] if come else []
            sentences.append(f"{where} holds other parameters ({'; '.join(parts)})")
    return sentences


def _hinted(names: Iterable[str], candidates: Iterable[str]) -> list[str]:
    pool = sorted(candidates)
    hinted: list[str] = []
    for name in sorted(names):
        near = get_close_matches(name, pool, n=1) if len(hinted) < _SHOWN else []
        hinted.append(f"{name} (did you mean {near[0]}?)" if near else name)
        pool = [each for each in pool if each not in near]  # one is not the former name of two
    return hinted


def _list(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


# ---- Validating and undoing

_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""Keys of the state dict of torch's GradScaler."""

_EXTRA: dict[str, Any] = {
    "tied": str,
    "numbers": str,
    "slots": Mapping,
    "modules": object,
    "loss_scaler": (int, float),
}
"""Parts of a trainable's extra state that the core writes, and what each of them maps names to."""


def check_alike(saved: Any, here: Any, what: str) -> None:
    """Raise where a value is of another kind than the one that it is to replace. Not collective.

    Kinds are: numbers (a tensor with one element is one), strings, ``None``, mappings, sequences of the same length.
    Keys that are only on one side are passed over, as is anything where ``None`` is here.

    Raises:
        CheckpointMismatchError: names the place and both values.
    """
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        for key in here.keys() & saved.keys():
            check_alike(saved[key], here[key], f"{what}.{key}")
    elif isinstance(here, (list, tuple)) and isinstance(saved, (list, tuple)) and len(here) == len(saved):
        for index, (old, new) in enumerate(zip(saved, here, strict=True)):
            check_alike(old, new, f"{what}[{index}]")
    elif here is None or (type(saved) is type(here) and isinstance(here, (bool, int, float, str))):
        return
    elif _kind(saved) != _kind(here) or isinstance(here, (list, tuple)):
        raise CheckpointMismatchError(
            f"{what} is {saved!r} in the checkpoint and {here!r} here",
            cure="Build the optimizer as it was built for the run that saved.",
        )


def _kind(value: Any) -> type:
    is_number = isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if is_number:
        return float
    return Mapping if isinstance(value, Mapping) else type(value)


def check_words(portable: PortableState, template: PortableState, trainable: Portable, what: str) -> None:
    """Raise where the state besides the tensors is invalid or does not fit; nothing is changed. Not collective.

    Args:
        portable: decoded; its tensors have no values yet.
        template: what the run has, for comparison.
        trainable: what is to take it.
        what: begins the sentences.

    Raises:
        CheckpointCorruptError: no run can have saved this.
        CheckpointMismatchError: hyper-parameters of another kind than the optimizer's here.
    """
    if not isinstance(portable.extra, Mapping) or not isinstance(portable.optimizers, list):
        raise _senseless(what)
    extra: Mapping[str, Any] = portable.extra
    for name, kind in _EXTRA.items():
        if not _is_mapping(extra.get(name, {}), kind):
            raise _senseless(f"{name} of {what}")
    for name in ("frozen", "ungrouped"):
        names = extra.get(name, [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            raise _senseless(f"{name} of {what}")
    for key, tensor in portable.tensors.items():
        if key in extra.get("numbers", {}) and tensor.numel() != 1:
            raise _senseless(f"{key}, which is a number,")
    if extra.get("loss_scaler") and not all(name in extra["loss_scaler"] for name in _SCALER):
        raise _senseless(f"the loss scale of {what}")
    for number, (saved, here) in enumerate(zip(portable.optimizers, template.optimizers, strict=False)):
        for index, (old, new) in enumerate(zip(saved, here, strict=False)):
            hyper = {key: value for key, value in new.items() if key != "params"}
            check_alike(old, hyper, f"optimizers[{number}][{index}] of {what}")
    for optimizer in trainable.optimizers:
        _check_slots(portable, trainable.module, optimizer, what)


def _check_slots(portable: PortableState, module: nn.Module, optimizer: Any, what: str) -> None:
    """Check the state with the optimizer's own ``__setstate__``, on a copy of the optimizer."""
    if not isinstance(optimizer, Optimizer):
        return
    names = {id(parameter): original_name(name) for name, parameter in module.named_parameters()}
    numbers = portable.extra.get("numbers", {})
    slots: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in portable.extra.get("slots", {}).items()}
    for key, tensor in portable.tensors.items():
        if key.startswith("optim."):
            name, _, slot = key.removeprefix("optim.").rpartition(".")
            slots.setdefault(name, {})[slot] = 0 if key in numbers else tensor
    state = {
        parameter: slots[names[id(parameter)]]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if names.get(id(parameter)) in slots
    }
    for parameter, saved in state.items():
        for slot, here in optimizer.state.get(parameter, {}).items():
            there = saved.get(slot)
            # A slot of another shape than its parameter's may change it from step to step.
            fixed = isinstance(here, Tensor) and here.shape in ((), parameter.shape)
            if fixed and isinstance(there, Tensor) and there.numel() != here.numel():
                raise CheckpointMismatchError(
                    f"optim.{names[id(parameter)]}.{slot} of {what} is {list(there.shape)} in the checkpoint and "
                    f"{list(here.shape)} here",
                    cure="Build the optimizer as it was built for the run that saved.",
                )
    kind: Any = type(optimizer)
    # An optimizer whose __del__ frees external resources would free the original's.
    stand_in: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": lambda _: None}))
    vars(stand_in).update(vars(optimizer))
    try:
        stand_in.__setstate__({"state": state, "param_groups": [dict(group) for group in optimizer.param_groups]})
    except Exception as problem:
        raise _senseless(f"the state of {type(optimizer).__name__} of {what} ({type(problem).__name__})") from problem


def set_extra_states(module: nn.Module, extra: Mapping[str, Any]) -> list[Callable[[], object]]:
    """Call ``set_extra_state`` of submodules; returns functions that undo it. Where one raises, none has changed.

    Raises:
        CheckpointMismatchError: a submodule that is not here or has no extra state.
    """
    undo: list[Callable[[], object]] = []
    parts = dict(module.named_modules(remove_duplicate=False))
    states = extra.get("modules", {})
    for path in states:
        if path not in parts or type(parts[path]).get_extra_state is nn.Module.get_extra_state:
            raise CheckpointMismatchError(
                f"{path} has extra state in the checkpoint and none here",
                cure="Build the model as the run did that saved it, with its get_extra_state and set_extra_state.",
            )
    try:
        for path, value in states.items():
            undo.append(partial(parts[path].set_extra_state, copy.deepcopy(parts[path].get_extra_state())))
            parts[path].set_extra_state(value)
    except BaseException:
        for again in reversed(undo):
            again()
        raise
    return undo


def remembered(item: Any) -> Callable[[], object]:
    """A function that restores an object's present state, by its own two methods. Collective where those are.

    Its tensors are copied into host memory, so that an object may keep a whole second model.
    """
    encoder = Encoder()
    tree = encoder.encode(item.state_dict(), "state")
    live = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in encoder.tensors.values()]
    copies = [tensor.to("cpu", copy=True) for tensor in live]
    # torch's schedulers take over whatever names a state has: those that were not there go again.
    holders = [one for one in (item, getattr(item, "scheduler", None)) if hasattr(one, "__dict__")]
    attributes = [(vars(one), set(vars(one))) for one in holders]

    @torch.no_grad()
    def take_back() -> None:
        for tensor, was in zip(live, copies, strict=True):
            tensor.copy_(was)
        item.load_state_dict(decode(tree, encoder.tensors.__getitem__))
        for names, before in attributes:
            for name in names.keys() - before:
                del names[name]

    return take_back


def _is_mapping(value: Any, kind: type | tuple[type, ...]) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and all(isinstance(each, kind) for each in value.values())
    )


def _senseless(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{what} has values that a checkpoint cannot have", cure="Load an older checkpoint: this one is damaged."
    )


# ---- Loading

LoadHooks = Callable[[Path], Collection[int]]


def load(
    path: str | Folder,
    state: TrainingState,
    backend: Backend,
    *,
    strict: bool = True,
    hooks: LoadHooks | None = None,
) -> Manifest:
    """Read a checkpoint into a run of any backend and world size. Collective over all ranks.

    Nothing of the run is changed unless all of it was found sound on every rank. Nothing is unpickled.

    Args:
        path: the checkpoint's folder, or its address; of a remote one each rank reads its share of all files, and then
            the rows that it needs.
        state: what to fill.
        backend: for collectives and the topology.
        strict: names in the checkpoint and here must be the same; otherwise differences are passed over with a warning.
            Shapes and parameter groups must always fit.
        hooks: called on every rank with the folder once its files were checked; with a local copy of what the
            manifest does not name, where the folder is remote. Returns the indices of trainables whose
            ``model.*`` tensors are left as they are.

    Returns:
        The manifest; its ``info`` is what the save was given.

    Raises:
        CheckpointNotFoundError: no complete checkpoint there.
        CheckpointCorruptError: a file is missing, truncated or altered.
        CheckpointMismatchError: the checkpoint is of another model, optimizer or script.
        CheckpointError: it is invalid, or an object refused its state. All on every rank, with the run as it
            was. Only a file that cannot be read any more after it was checked, and an engine that refuses what fits,
            fail with the weights replaced; the message says so.
    """
    folder = folder_of(path).absolute()
    ranks = Ranks(backend)
    manifest = Manifest.from_json(ranks.on_main("read the manifest", lambda: read_text(folder)), str(folder / MANIFEST))
    ranks.agree("check its share of the files", lambda: _check_share(folder, manifest, ranks))
    skipped = frozenset[int]()
    if hooks is not None:
        with storage_of(folder).readable(folder, manifest) as readable:
            skipped = frozenset(hooks(readable))
    work = _Load(folder, manifest, state, backend, skipped)
    differences = joined(ranks.agree("compare the checkpoint", work.compare))
    passed_over = judge(differences, str(folder), strict=strict)
    if passed_over:
        work.remarks.insert(0, f"strict=False passes over: {passed_over}")
    ranks.agree("make sense of the checkpoint", work.decode)
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
            cure="Load another checkpoint, or start the run again: some weights are the checkpoint's now, and others "
            "are not.",
        ) from problem
    return manifest


def _check_share(folder: Folder, manifest: Manifest, ranks: Ranks) -> None:
    """Check this rank's share of the files, dealt out by their size so that no rank gets all large ones."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in by_size[ranks.rank :: ranks.world_size]:
        check_file(folder, name, manifest.files[name])


class _Load:
    """One rank's part of one load. Its methods run in the order written here."""

    def __init__(
        self, folder: Folder, manifest: Manifest, state: TrainingState, backend: Backend, skip_models: frozenset[int]
    ) -> None:
        self._folder, self._manifest, self._state = folder, manifest, state
        self._topology, self._skip_models = backend.topology, skip_models
        self._templates: list[PortableState] = []
        self._names: list[dict[str, str]] = []
        """Names in the checkpoint of each trainable's tensors, by their own."""
        self._targets: dict[str, Any] = {}  # Tensors of models and optimizers to be filled, by stored name.
        self._words: dict[str, Any] = {}  # New tensors for all other state.
        self._read_weights: Callable[[], Future[None]]
        self._aliases: dict[str, str] = {}  # Stored name wanted here: the stored name that it was tied to.
        self._portable: list[PortableState] = []
        self._objects: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._rng: Any = None
        self._undo: list[Callable[[], object]] = []
        self._cast: list[str] = []  # Sentences about tensors of another dtype.
        self.remarks: list[str] = []

    def compare(self) -> Differences:
        """Lay out what is to be filled and find what does not fit. Not collective."""
        found = Differences(unused={name for name in self._manifest.tensors if name.startswith(("model", "optim"))})
        for index, trainable in enumerate(self._state.trainables):
            if index < len(self._manifest.trainables):
                self._compare_trainable(index, trainable, found)
            else:
                kind, count = self._kind(index), len(self._manifest.trainables)
                found.others.append(f"{kind} {index} is here, {count} were saved")
        if self._cast:
            count = len(self._cast)
            self.remarks.append(f"{count} tensor(s) change their dtype while loading, the first is {self._cast[0]}")
        if self._state.rng:
            self._compare_rng()
        here, saved = set(self._state.objects), set(self._manifest.objects)
        found.missing.update(f"objects.{name}" for name in here - saved - self._state.newer)
        ended = {name for name in saved - here if self._state.ended(name, self._manifest.objects[name])}
        if ended:
            self.remarks.append(
                f"{_list(sorted(ended))} of the checkpoint had ended their pass over the data and are not prepared "
                "here; they begin with their first epoch where they are prepared later"
            )
        found.unused.update(f"objects.{name}" for name in saved - here - ended)
        self._lay_out(self._manifest.counters)
        for entry in self._manifest.trainables[: len(self._state.trainables)]:
            self._lay_out([entry["optimizers"], entry["extra"]])
        for name in sorted(here & saved):
            keys = {key for key, _ in tensor_keys(self._manifest.objects[name])}
            is_sharded = any(self._manifest.tensors[key].sharded for key in keys)
            self._lay_out(self._manifest.objects[name], self._state.objects[name].state_dict() if is_sharded else None)
        return found

    def decode(self) -> None:
        """Read everything but the tensors of models and optimizers, and check it. Not collective."""
        aliases = {name: self._manifest.tensors[first] for name, first in self._aliases.items()}
        tensors = {**self._manifest.tensors, **aliases}
        reader = DrivetrainReader(self._folder, dataclasses.replace(self._manifest, tensors=tensors))
        metadata = reader.read_metadata()

        def plan(targets: dict[str, Any]) -> tuple[LoadPlan, DefaultLoadPlanner]:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(targets, metadata)
            return planner.create_local_plan(), planner

        weights = plan(self._targets)
        reader.check_data(weights[0])
        self._read_weights = partial(reader.read_data, *weights)
        reader.read_data(*plan(self._words)).wait()
        for index, (trainable, template) in enumerate(zip(self._state.trainables, self._templates, strict=True)):
            saved = self._manifest.trainables[index]
            names = self._names[index]
            tensors = {own: self._targets[names[own]] for own in template.tensors if names[own] in self._targets}
            optimizers = decode(saved["optimizers"], self._words.__getitem__) if trainable.optimizers else []
            portable = PortableState(tensors, optimizers, decode(saved["extra"], self._words.__getitem__))
            check_words(portable, template, trainable, f"model {index}")
            self._portable.append(portable)
        self._objects = {
            name: decode(self._manifest.objects[name], self._words.__getitem__)
            for name in self._state.objects
            if name in self._manifest.objects
        }
        self._counters = decode(self._manifest.counters, self._words.__getitem__)
        if not isinstance(self._counters, dict) or any(type(each) is not int for each in self._counters.values()):
            raise CheckpointCorruptError("the counters make no sense", whose=str(self._folder))
        file = self._rng_file(self._topology.dp_rank)
        if self._state.rng and file is not None:
            self._rng = _read_rng(self._folder / file, self._topology.device)
        for sentence in self.remarks if self._topology.rank == 0 else ():
            warnings.warn(sentence, stacklevel=6)  # the script's line that calls Accelerator.load_state

    def take_over_objects(self) -> None:
        """Load the state of registered objects, schedulers and loaders. Collective where their methods are."""
        for trainable, portable in zip(self._state.trainables, self._portable, strict=True):
            self._undo += set_extra_states(trainable.module, portable.extra)
        for name, decoded in self._objects.items():
            item = self._state.objects[name]
            remember = self._state.remember.get(name)
            self._undo.append(remember() if remember is not None else remembered(item))
            item.load_state_dict(decoded)

    def take_back(self) -> None:
        """Undo what :meth:`take_over_objects` has done. Collective where that is."""
        while self._undo:
            again = self._undo.pop()
            try:
                again()
            except Exception as problem:  # noqa: BLE001  The others are taken back all the same, and the cause is told.
                warnings.warn(f"an object does not take its own former state back: {problem!r}", stacklevel=3)

    def fill(self) -> None:
        """Read the weights: every tensor that this rank needs, its own boxes only. Not collective."""
        self._read_weights().wait()

    def take_over(self) -> None:
        """Load all state into its objects; random state last: objects may draw numbers. Collective where they are."""
        for trainable, portable in zip(self._state.trainables, self._portable, strict=True):
            trainable.load_portable_state(portable)
        self._state.counters.update(self._counters)
        if self._rng is not None:
            restore_rng(self._rng, self._topology.device)
        elif self._state.rng and self._manifest.rng:
            seed_all(self._derived_seed(self._topology.dp_rank))

    def _kind(self, index: int) -> str:
        return "average" if index >= len(self._state.trainables) - self._state.averages else "model"

    def _compare_trainable(self, index: int, trainable: Portable, found: Differences) -> None:
        saved, specs = self._manifest.trainables[index], self._manifest.specs(index)
        kind = "average" if "average" in saved["extra"] else "model"
        if kind != self._kind(index):
            found.others.append(f"{self._kind(index)} {index} here is a {kind} in the checkpoint")
            self._templates.append(PortableState())
            self._names.append({})
            return
        tied = saved["extra"].get("tied", {})
        origins = _tied_names(specs, tied)
        template = trainable.portable_template({**{own: specs[first] for own, first in origins.items()}, **specs})
        self._templates.append(template)
        left_out: tuple[str, ...] = ("model.",) if index in self._skip_models else ()
        if not trainable.optimizers and any(own.startswith("optim.") for own in specs):
            left_out += ("optim.",)
            self.remarks.append(f"the optimizer state of model {index} is left out: no optimizer is prepared with it")
        names = {own: stored_name(own, index) for own in {**template.tensors, **specs}}
        self._names.append(names)
        found.unused -= {names[own] for own in specs if own.startswith(left_out)}
        for own, target in template.tensors.items():
            first = own if own in specs else origins.get(own, own)
            if own.startswith(left_out):
                continue
            if first not in specs:
                found.missing.add(names[own])
            else:
                found.unused.discard(names[first])
                self._match(names[own], names[first], specs[first], target, found)
        if trainable.optimizers and not saved["optimizers"]:
            found.missing.add(f"optimizer state of model {index}")
        elif trainable.optimizers and template.optimizers:
            both = {**template.extra.get("tied", {}), **tied}
            ungrouped = saved["extra"].get("ungrouped", ())
            found.others += compare_groups(saved["optimizers"], template.optimizers, both, f"model {index}", ungrouped)

    def _match(self, stored: str, first: str, spec: TensorSpec, target: Tensor, found: Differences) -> None:
        """Fill ``target``, wanted under the name ``stored``, from the saved tensor ``first``, if it fits."""
        if tuple(target.shape) != spec.shape:
            shapes = f"{list(spec.shape)} in the checkpoint and {list(target.shape)} here"
            found.shapes.append(f"{stored} is {shapes}")
            return
        here = dtype_name(target.dtype)
        if here != spec.dtype and torch_dtype(stored, spec.dtype).is_complex != target.dtype.is_complex:
            found.others.append(f"{stored} is {spec.dtype} in the checkpoint and {target.dtype} here")
        else:
            if here != spec.dtype:
                self._cast.append(f"{stored} from {spec.dtype} to {here}")
            self._targets[stored] = target
            if first != stored:
                self._aliases[stored] = first

    def _lay_out(self, tree: Any, like: Any = None) -> None:
        """Allocate the tensors of encoded state: on the CPU, or sharded as they are now."""
        for key, present in tensor_keys(tree, like):
            entry = self._manifest.tensors[key]
            if key.startswith(("model", "optim")):
                raise CheckpointCorruptError(f"{key} is named as the state of something else", whose=str(self._folder))
            if isinstance(present, DTensor) and tuple(present.shape) == entry.shape:
                self._words[key] = torch.empty_like(present)
            else:
                self._words[key] = torch.empty(entry.shape, dtype=torch_dtype(key, entry.dtype))

    def _compare_rng(self) -> None:
        """Add a remark if the checkpoint has no random state; log if it lacks only that of some coordinates."""
        lacking = [at for at in range(self._topology.dp_size) if self._rng_file(at) is None]
        if lacking and not self._manifest.rng:
            self.remarks.append("the checkpoint holds no random state; the run goes on with its own")
        elif lacking and self._topology.rank == 0:
            # No warning: a run that is resumed on more processes is as it should be.
            logger.info(
                "the checkpoint holds the random state of %d data-parallel process(es), and here are %d: "
                "the others draw from seeds that follow from it",
                len(self._manifest.rng),
                self._topology.dp_size,
            )

    def _rng_file(self, coordinate: int) -> str | None:
        """The file with this coordinate's random state; any where all that were saved are the same."""
        saved = self._manifest.rng
        states = {self._manifest.files[name].crc32 for name in saved.values()}
        if coordinate not in saved and len(states) == 1 and not script_draws_apart():
            return saved[min(saved)]
        return saved.get(coordinate)

    def _derived_seed(self, coordinate: int) -> int:
        """A seed that depends on the checkpoint and the coordinate only."""
        first = self._manifest.files[self._manifest.rng[min(self._manifest.rng)]]
        return zlib.crc32(f"{first.crc32}/{coordinate}".encode())


def _tied_names(specs: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> dict[str, str]:
    """Further names of saved tied tensors: ``{"model.head.weight": "model.embed.weight"}``."""
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


def _read_rng(path: Folder, device: str) -> Any:
    """A file's random state. Raises where the generators do not accept it; they are left unchanged."""
    file, before = TensorFile(path), capture_rng(device)
    try:
        sources = file.sources()
        saved = decode(json.loads(file.metadata["tree"]), lambda key: sources[key].produce().clone())
        restore_rng(saved, device)
    except Exception as problem:
        what = f"{path.name} holds no random state: {type(problem).__name__}: {problem}"
        raise CheckpointCorruptError(what.rstrip("."), whose=str(path.parent)) from problem
    finally:
        restore_rng(before, device)
    return saved
