"""Writes one model of a Drivetrain checkpoint in another program's format."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.api import CheckpointError
from drivetrain.api.programs import checkpoint
from drivetrain_convert.foreign import Source
from drivetrain_convert.formats import did_you_mean, load_format


@dataclass(frozen=True)
class SavedModel:
    """The content of a checkpoint for one model.

    Args:
        tensors: ``model.<fqn>`` and ``optim.<fqn>.<slot>``; each is read when it is produced, whole.
        optimizers: for each optimizer its parameter groups, ``"params"`` being names.
        extra: further state of the engine: ``tied`` (first name of each further one), ``numbers`` (kind of the slots
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


def read_saved(source: str | checkpoint.Folder, index: int = 0) -> SavedModel:
    """Check every file and read everything but the tensors. Not collective.

    Raises:
        CheckpointError: not found, damaged, or no such model.
    """
    folder = checkpoint.folder_of(source).absolute()
    manifest = checkpoint.read_manifest(folder)
    if index >= len(manifest.trainables):
        raise CheckpointError(
            f"the checkpoint holds {len(manifest.trainables)} model(s), counted from 0, and no model {index}",
            whose=str(folder),
            cure="`drivetrain checkpoint inspect` shows what it holds.",
        )
    for name, entry in manifest.files.items():
        checkpoint.check_file(folder, name, entry)

    def fetch(key: str) -> Any:
        return checkpoint.read_tensor(folder, key, manifest.tensors[key])

    tensors = {}
    for own, spec in manifest.specs(index).items():
        key = checkpoint.stored_name(own, index)
        tensors[own] = Source(own, checkpoint.torch_dtype(own, spec.dtype), spec.shape, partial(fetch, key))
    own_part = manifest.trainables[index]
    return SavedModel(
        tensors,
        checkpoint.decode(own_part["optimizers"], fetch),
        checkpoint.decode(own_part["extra"], fetch),
        int((checkpoint.decode(manifest.counters, fetch) or {}).get("step", 0)),
        manifest.world_size,
        {name: checkpoint.decode(tree, fetch) for name, tree in manifest.objects.items()},
    )


def convert_to(
    source: str | checkpoint.Folder,
    target: str | Path,
    name: str,
    options: Mapping[str, str] | None = None,
    *,
    index: int = 0,
) -> list[str]:
    """Write one of our checkpoints in a plugin's format. Not collective.

    Args:
        source: folder that ``save_state`` wrote, or its address; every file is checked first.
        target: local folder of the other program's checkpoint; must not exist, and appears whole or not at all.
        name: of the format.
        options: see the format's ``options``.
        index: which of the run's models.

    Returns:
        Sentences about what could not be carried over.

    Raises:
        CheckpointError: nothing to read, no such writer, an unknown option, or ``target`` exists.
    """
    path = checkpoint.local_folder(target, "another program's checkpoint is written into").absolute()
    given = dict(options or {})
    if path.exists():
        raise CheckpointError(f"{path} exists already", cure="Name a folder that does not; nothing was written.")
    writer = load_format(name)
    for option in given:
        if option not in writer.options:
            known = "; ".join(f"{key}: {text}" for key, text in writer.options.items())
            raise CheckpointError(
                f"the format {name} has no option {option!r}.{did_you_mean(option, writer.options)}",
                cure=f"Its options: {known or 'none'}.",
            )
    saved = read_saved(source, index)
    staging = path.with_name(f".{path.name}.unfinished-{secrets.token_hex(6)}")
    staging.mkdir(parents=True)
    try:
        left_out = writer.write(saved, staging, given)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return left_out
