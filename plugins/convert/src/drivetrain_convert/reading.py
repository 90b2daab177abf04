"""Converts another library's checkpoint to a Drivetrain checkpoint.

Reads Accelerate's folders, files of ``torch.save`` and safetensors, folders of ``torch.distributed.checkpoint``, and
the formats that plugins bring. One tensor is in memory at a time; not collective.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import CheckpointError, CheckpointNotFoundError, Mesh
from drivetrain.api.programs import checkpoint
from drivetrain_convert.accelerate_folder import add_rest, read_accelerate
from drivetrain_convert.dcp_folder import is_dcp_folder, read_dcp_folder
from drivetrain_convert.foreign import (
    ForeignCheckpoint,
    Source,
    Tensors,
    add_safetensors,
    clean,
    load_pickle,
    try_pickle,
)
from drivetrain_convert.formats import installed_formats, load_format
from drivetrain_convert.matching import Shape, match, match_unordered

_NOT_OF_THE_RUN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own layers; no optimizer holds them."""
_FILE_BYTES = 2 << 30
KINDS = ("auto", "accelerate", "torch", "fabric")
"""Formats that are read without a plugin; what Lightning Fabric saves is one of torch's two."""


@dataclass
class Converted:
    """Result of a conversion.

    Args:
        path: the checkpoint that was written.
        kind: a description of the source's format.
        carried: sentences about what is in it.
        left_out: sentences about what is not, and why.
    """

    path: checkpoint.Folder
    kind: str
    carried: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass
class _Trainable:
    """One model with its optimizers as a trainable of the portable checkpoint."""

    tensors: Tensors
    tied: dict[str, str]
    ordered: bool
    order: list[str] | None = None
    """Parameters in the model's order, where somebody who knows has said it."""
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    slots: Tensors = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)


def convert(
    source: str | Path, target: str | checkpoint.Folder, kind: str = "auto", *, parameters: Sequence[str] = ()
) -> Converted:
    """Read a checkpoint of another library and write it as ours. Not collective; nothing in it is executed.

    Args:
        source: the file or folder that the library wrote.
        target: folder of the new checkpoint, or its address; must not exist.
        kind: ``"accelerate"``, ``"torch"``, ``"fabric"``, the name of a plugin's format, or ``"auto"`` to look.
        parameters: names of the (first) model's parameters in its own order, as ``named_parameters()`` gives them: what
            ties the numbers in an optimizer's state to names when the model's file does not keep the order.

    Returns:
        What was carried over, and what was not.

    Raises:
        CheckpointNotFoundError: nothing at ``source``.
        CheckpointError: no model can be read from it, or ``target`` exists.
    """
    path = checkpoint.folder_of(target).absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists already", cure="Name a folder that does not; nothing was written.")
    foreign = _read(checkpoint.local_folder(source, "another library's checkpoint is read from"), kind)
    trainables = [
        _Trainable(tensors, dict(tied), ordered)
        for tensors, tied, ordered in zip(foreign.models, foreign.tied, foreign.ordered, strict=True)
    ]
    if parameters:
        trainables[0].order = _in_order(trainables[0], parameters)
    report = Converted(path, foreign.kind, left_out=list(foreign.left_out))
    for number, state in enumerate(foreign.optimizers):
        _give(number, state, trainables, report)
    for index, trainable in enumerate(trainables):
        _untie(trainable)
        count = f"{len(trainable.tensors)} tensors of model {index}"
        tied = f", {len(trainable.tied)} of them under a second name" if trainable.tied else ""
        report.carried.insert(index, count + tied)
    _write(path, foreign, trainables, report)
    return report


def _give(number: int, state: Mapping[str, Any], trainables: Sequence[_Trainable], report: Converted) -> None:
    """Find the model whose parameters an optimizer holds: that of its own number first, then any."""
    order = sorted(range(len(trainables)), key=lambda index: (index != number, index))
    for index in order:
        names = _names(state, trainables[index])
        if names is not None:
            _take(state, names, trainables[index])
            report.carried.append(f"optimizer {number}, for model {index}, with {len(state['state'])} states")
            return
    report.left_out.append(
        f"optimizer {number}: it numbers its parameters, and the numbers fit the names of no model in exactly one way; "
        "say the order with --parameters"
    )


def _names(state: Mapping[str, Any], trainable: _Trainable) -> dict[Any, str] | None:
    """Name of each key of an optimizer's state, ``None`` when it is ambiguous."""
    groups = state["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    written = [name for group in groups for name in group.get("param_names", ())]
    if len(written) != len(keys):
        written = keys if all(isinstance(key, str) for key in keys) else []
    if written:
        named = {key: _known(str(name), trainable) for key, name in zip(keys, written, strict=True)}
        return {key: name for key, name in named.items() if name} if all(named.values()) else None
    known = trainable.order or [
        name
        for name, source in trainable.tensors.items()
        if name.rpartition(".")[2] not in _STATISTICS and source.dtype.is_floating_point
    ]
    candidates = [(name, trainable.tensors[name].shape) for name in known]
    shapes = [[_shape(state["state"].get(key)) for key in group["params"]] for group in groups]
    found = (match if trainable.order or trainable.ordered else match_unordered)(candidates, shapes)
    if found is None:
        return None
    flat = [name for group in found for name in group]
    return dict(zip(keys, flat, strict=True))


def _in_order(trainable: _Trainable, parameters: Sequence[str]) -> list[str]:
    """These names as the model's own, tied ones once."""
    known = {name: _known(name, trainable) for name in parameters}
    strange = [name for name, own in known.items() if own is None]
    if strange:
        raise CheckpointError(f"the model has no parameter {', '.join(strange[:6])}", cure="See --parameters.")
    return list(dict.fromkeys(own for own in known.values() if own is not None))


def _known(name: str, trainable: _Trainable) -> str | None:
    """The model's own name of a parameter."""
    for each in (clean(name), clean(name).removeprefix("module.")):
        if each in trainable.tensors:
            return each
        if each in trainable.tied:
            return trainable.tied[each]
    return None


def _shape(slots: Mapping[str, Any] | None) -> Shape | None:
    """Shape of a parameter as its state shows it: that of its largest slot; ``None`` when it has none of any size."""
    shapes = [tuple(value.shape) for value in (slots or {}).values() if isinstance(value, (Tensor, Source))]
    wide = [shape for shape in shapes if shape]
    return max(wide, key=len) if wide else None


def _take(state: Mapping[str, Any], names: Mapping[Any, str], trainable: _Trainable) -> None:
    trainable.optimizers.append(
        [
            {
                "params": [names[key] for key in group["params"]],
                **{key: value for key, value in group.items() if key not in _NOT_OF_THE_RUN},
            }
            for group in state["param_groups"]
        ]
    )
    for key, slots in state["state"].items():
        name = names.get(key) or _known(str(key), trainable)
        if name is None:
            raise CheckpointError(
                f"the optimizer has state for {key!r}, which is in none of its groups",
                cure="Save the whole of optimizer.state_dict(), with its param_groups.",
            )
        for slot, value in slots.items():
            own = f"optim.{name}.{slot}"
            if type(value) in _NUMBERS:
                trainable.numbers[own] = type(value).__name__
                trainable.slots[own] = Source.of(own, torch.tensor(value, dtype=_NUMBERS[type(value)]))
            elif isinstance(value, Source):
                trainable.slots[own] = Source(own, value.dtype, value.shape, value.produce)
            elif isinstance(value, Tensor):
                trainable.slots[own] = Source.of(own, value)


def _untie(trainable: _Trainable) -> None:
    """Recognise tied parameters that were saved twice: equal to the bit, and only one of them has an optimizer."""
    held = {name for groups in trainable.optimizers for group in groups for name in group["params"]}
    if not held:
        return
    for name, source in list(trainable.tensors.items()):
        if name in held or len(source.shape) < 2:
            continue
        for first in held:
            other = trainable.tensors[first]
            if other.shape == source.shape and other.dtype == source.dtype and _equal(other, source):
                del trainable.tensors[name]
                trainable.tied[name] = first
                break


def _equal(one: Source, other: Source) -> bool:
    return torch.equal(one.produce(), other.produce())


def _write(
    path: checkpoint.Folder, foreign: ForeignCheckpoint, trainables: Sequence[_Trainable], report: Converted
) -> None:
    encoder = checkpoint.Encoder()
    sources: Tensors = {}
    entries = []
    for index, trainable in enumerate(trainables):
        for name, source in trainable.tensors.items():
            sources[checkpoint.stored_name(f"model.{name}", index)] = source
        for own, source in trainable.slots.items():
            sources[checkpoint.stored_name(own, index)] = source
        extra: dict[str, Any] = {"tied": trainable.tied, "numbers": trainable.numbers}
        if index == 0:
            extra["ungrouped"] = foreign.ungrouped
        if index == 0 and foreign.scaler is not None:
            extra["loss_scaler"] = foreign.scaler
        entries.append(
            {
                "optimizers": encoder.encode(trainable.optimizers, f"trainables.{index}.optimizers"),
                "extra": encoder.encode({name: part for name, part in extra.items() if part}, f"trainables.{index}"),
            }
        )
    objects = {}
    for name, state in foreign.objects.items():
        try:
            objects[name] = encoder.encode(state, f"objects.{name}")
            report.carried.append(name)
        except CheckpointError as problem:
            report.left_out.append(problem.what)
    report.carried += ["the loss scale"] if foreign.scaler is not None else []
    report.carried += [f"the random state of {len(foreign.rng)} process(es)"] if foreign.rng else []
    sources |= {name: Source.of(name, tensor) for name, tensor in encoder.tensors.items()}
    step = _steps(trainables)
    if not any(name.startswith("loader.") for name in objects):
        report.left_out.append(
            "the position in the data: prepared loaders begin an epoch; load_state needs strict=False for them"
        )
    storage = checkpoint.storage_of(path)
    staging = storage.stage(path)
    try:
        data = staging.data.name
        files, tensors = _write_tensors(staging.folder, f"{data}/tensors", sources)
        rng = {}
        for coordinate, tree in foreign.rng.items():
            numbers = checkpoint.Encoder()
            text = json.dumps(numbers.encode(tree, "rng"))
            rng[coordinate] = f"{data}/rng-{coordinate:05d}.safetensors"
            parts = [Source.of(key, tensor) for key, tensor in numbers.tensors.items()]
            files[rng[coordinate]] = checkpoint.write_tensors(staging.folder / rng[coordinate], parts, {"tree": text})
        manifest = checkpoint.Manifest(
            backend=f"converted from {foreign.kind}",
            mesh=Mesh().sizes,
            world_size=1,
            created=time.time(),
            libraries=checkpoint.library_versions(),
            info={"notes": _finite(foreign.notes)} if foreign.notes else {},
            counters={"step": step},
            trainables=tuple(entries),
            objects=objects,
            tensors=tensors,
            files=files,
            rng=rng,
        )
        storage.commit(staging, manifest)
    except BaseException:
        storage.abandon(staging)
        raise


def _write_tensors(
    staging: checkpoint.Folder, prefix: str, sources: Tensors
) -> tuple[dict[str, checkpoint.FileEntry], dict[str, checkpoint.TensorEntry]]:
    files: dict[str, checkpoint.FileEntry] = {}
    tensors: dict[str, checkpoint.TensorEntry] = {}
    for number, batch in enumerate(_batches(sources)):
        file = f"{prefix}-{number:05d}.safetensors"
        files[file] = checkpoint.write_tensors(
            staging / file, [Source(name, one.dtype, one.shape, one.produce) for name, one in batch], {"format": "pt"}
        )
        for name, one in batch:
            chunk = checkpoint.Chunk((0,) * len(one.shape), one.shape, file, name)
            tensors[name] = checkpoint.TensorEntry(checkpoint.dtype_name(one.dtype), one.shape, (chunk,))
    return files, tensors


def _batches(sources: Tensors) -> Iterator[list[tuple[str, Source]]]:
    batch: list[tuple[str, Source]] = []
    size = 0
    for name, source in sources.items():
        if batch and size + source.num_bytes > _FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, source))
        size += source.num_bytes
    if batch:
        yield batch


def _steps(trainables: Sequence[_Trainable]) -> int:
    """Return the number of optimizer steps so far, by the optimizers' own counters."""
    counters = [
        int(source.produce())
        for trainable in trainables
        for name, source in trainable.slots.items()
        if name.endswith(".step") and not source.shape
    ]
    return max(counters, default=0)


def _finite(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON: non-finite numbers become text."""
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in notes.items()
    }


def _read(path: Path, kind: str) -> ForeignCheckpoint:
    """Read another library's checkpoint.

    Args:
        path: file or folder.
        kind: ``"accelerate"``, ``"torch"``, ``"fabric"``, the name of a plugin's format, or ``"auto"``, which looks.

    Raises:
        CheckpointNotFoundError: nothing there.
        CheckpointError: not of this kind, or nothing in it can be read safely.
    """
    if not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}", cure="Correct the path.")
    if (path / "manifest.json").is_file():
        raise CheckpointError(f"{path} is a Drivetrain checkpoint already", cure="Load it as it is.")
    if kind not in KINDS:
        found = load_format(kind, KINDS).read(path)
    elif kind == "auto" and (of_plugin := _recognised(path)) is not None:
        found = of_plugin
    elif kind == "accelerate" or (kind == "auto" and path.is_dir() and not is_dcp_folder(path)):
        found = read_accelerate(path)
    elif path.is_dir():
        if not is_dcp_folder(path):
            raise CheckpointError(f"{path} is no folder of torch.distributed.checkpoint", cure="Try --from auto.")
        found = ForeignCheckpoint("a folder of torch.distributed.checkpoint")
        found.add_tree(read_dcp_folder(path), "the folder")
        if (path / "meta.pt").is_file():
            found.kind = "a sharded checkpoint of Lightning Fabric"
            try_pickle(found, path / "meta.pt", lambda tree: found.add_tree(tree, "meta.pt"))
    else:
        found = _read_file(path)
    if not found.models:
        raise CheckpointError(
            f"no model was found in {path}" + "".join(f"; {sentence}" for sentence in found.left_out),
            cure="Give --from accelerate, torch or fabric, and the file or folder that the library wrote.",
        )
    return found


def _recognised(path: Path) -> ForeignCheckpoint | None:
    """The content as read by a plugin, ``None`` when none recognises it. Accelerate wraps some engines' own folders."""
    for name in installed_formats():
        reader = load_format(name)
        if reader.recognises(path):
            found = reader.read(path)
            if path.is_dir() and any(path.glob("random_states_*.pkl")):
                add_rest(found, path)
                found.kind = f"Accelerate's folder with {found.kind}"
            return found
    return None


def _read_file(path: Path) -> ForeignCheckpoint:
    if path.suffix == ".safetensors":
        found = ForeignCheckpoint("a safetensors file")
        add_safetensors(found, [path])
        return found
    found = ForeignCheckpoint("a file of torch.save")
    tree = load_pickle(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(tree).__name__}, not a dictionary",
            cure="Give a file to which a state dict was saved: torch.save(model.state_dict(), path).",
        )
    found.add_tree(tree, path.name)
    return found
