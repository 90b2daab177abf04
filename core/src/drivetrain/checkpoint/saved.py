"""One model of a checkpoint of ours, for whoever writes it in another program's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.folder import check_file
from drivetrain.checkpoint.manifest import read_manifest, stored_name
from drivetrain.checkpoint.storage import read_tensor, torch_dtype
from drivetrain.checkpoint.tensorfile import Source
from drivetrain.checkpoint.tree import decode
from drivetrain.errors import CheckpointError


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint holds of one model.

    Args:
        tensors: ``model.<fqn>`` and ``optim.<fqn>.<slot>``; each is read when it is produced, whole.
        optimizers: for each optimizer its parameter groups, ``"params"`` being names.
        extra: what the engine kept beside: ``tied`` (first name of each further one), ``numbers`` (kind of the slots
            that are plain numbers), ``loss_scaler``.
        step: optimizer steps so far.
        world_size: processes of the job that saved.
        objects: state of the run's schedulers and other objects, by name.
    """

    tensors: Mapping[str, Source]
    optimizers: list[list[dict[str, Any]]]
    extra: Mapping[str, Any]
    step: int
    world_size: int
    objects: Mapping[str, Any]


def read_saved(checkpoint: str | Path, index: int = 0) -> SavedModel:
    """Read what is small, and check every file first. Not collective.

    Raises:
        CheckpointError: not found, damaged, or no such model.
    """
    folder = Path(checkpoint).absolute()
    manifest = read_manifest(folder)
    if index >= len(manifest.trainables):
        raise CheckpointError(f"the checkpoint holds {len(manifest.trainables)} model(s)", whose=str(folder))
    for name, entry in manifest.files.items():
        check_file(folder, name, entry)

    def fetch(key: str) -> Any:
        return read_tensor(folder, key, manifest.tensors[key])

    tensors = {}
    for own, spec in manifest.specs(index).items():
        key = stored_name(own, index)
        tensors[own] = Source(own, torch_dtype(own, spec.dtype), spec.shape, partial(fetch, key))
    own_part = manifest.trainables[index]
    return SavedModel(
        tensors,
        decode(own_part["optimizers"], fetch),
        decode(own_part["extra"], fetch),
        int((decode(manifest.counters, fetch) or {}).get("step", 0)),
        manifest.world_size,
        {name: decode(tree, fetch) for name, tree in manifest.objects.items()},
    )
