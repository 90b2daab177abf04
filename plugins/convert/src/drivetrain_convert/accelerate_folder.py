"""Reads folders that Accelerate's ``save_state`` wrote: plain, and FSDP's, full or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.api import CheckpointError
from drivetrain_convert.dcp_folder import is_dcp_folder, read_dcp_folder
from drivetrain_convert.foreign import ForeignCheckpoint, add_safetensors, load_pickle, try_pickle

_NOT_READ = {
    "sampler*.bin": "a sampler is saved as a program object",
    "dl_state_dict*.bin": "the position of a loader of torchdata's",
    "*_rank*.bin": "one rank's own shard, which only the same world reads",
}


def read_accelerate(folder: Path) -> ForeignCheckpoint:
    """Read such a folder; pickles as weights only.

    Raises:
        CheckpointError: no folder, or a model's file cannot be read. Other unreadable files are left out instead.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", cure="Accelerate's save_state writes a folder.")
    found = ForeignCheckpoint("a save_state folder of Accelerate")
    _add_models(found, folder)
    add_rest(found, folder)
    return found


def add_rest(found: ForeignCheckpoint, folder: Path) -> None:
    """Read what Accelerate saves besides the models: optimizers, schedulers, the scaler, random states."""
    for path in sorted(folder.glob("optimizer*"), key=_number):
        if is_dcp_folder(path):
            found.add_tree(read_dcp_folder(path), path.name)
        elif path.suffix == ".bin":
            try_pickle(found, path, found.optimizers.append)
    for pattern, word in (("scheduler*.bin", "scheduler"), ("custom_checkpoint_*.pkl", "custom")):
        for number, path in enumerate(sorted(folder.glob(pattern), key=_number)):
            try_pickle(found, path, partial(found.objects.__setitem__, f"{word}.{number}"))
    if (folder / "scaler.pt").is_file():
        try_pickle(found, folder / "scaler.pt", lambda state: setattr(found, "scaler", state))
    for path in sorted(folder.glob("random_states_*.pkl"), key=_number):
        try_pickle(found, path, partial(_take_rng, found, _number(path)))
    if len(found.rng) > 1 and any(name.startswith("scheduler.") for name in found.objects):
        found.left_out.append(
            f"Accelerate moves a scheduler once per process, so it may stand {len(found.rng)} times as far as the steps"
        )
    for pattern, reason in _NOT_READ.items():
        found.left_out += [f"{path.name}: {reason}" for path in folder.glob(pattern)]


def _take_rng(found: ForeignCheckpoint, coordinate: int, state: Mapping[str, Any]) -> None:
    found.rng[coordinate] = _rng(state)


def _add_models(found: ForeignCheckpoint, folder: Path) -> None:
    for index in range(_count(folder)):
        suffix = f"_{index}" if index else ""
        safe = sorted({*folder.glob(f"model{suffix}.safetensors"), *folder.glob(f"model{suffix}-*-of-*.safetensors")})
        if safe:
            add_safetensors(found, safe)
        elif (folder / f"pytorch_model{suffix}.bin").is_file():
            found.add_model(load_pickle(folder / f"pytorch_model{suffix}.bin"))
        elif (folder / f"pytorch_model_fsdp{suffix}.bin").is_file():
            found.kind = "Accelerate's FSDP checkpoint, full"
            found.add_model(load_pickle(folder / f"pytorch_model_fsdp{suffix}.bin"))
    shards = sorted((path for path in folder.glob("pytorch_model_fsdp_*") if is_dcp_folder(path)), key=_number)
    for path in [folder] if is_dcp_folder(folder) else shards:
        found.kind = "Accelerate's FSDP checkpoint, sharded"
        found.add_tree(read_dcp_folder(path), path.name)


def _count(folder: Path) -> int:
    """Number of models that are not folders; the first one's name has no number."""
    stems = (("model", ".safetensors"), ("pytorch_model", ".bin"), ("pytorch_model_fsdp", ".bin"))
    count = 1
    while any((folder / f"{stem}_{count}{suffix}").is_file() for stem, suffix in stems):
        count += 1
    return count


def _number(path: Path) -> int:
    last = path.stem.rpartition("_")[2]
    return int(last) if last.isdigit() else 0


def _rng(state: Mapping[str, Any]) -> dict[str, Any]:
    """Accelerate's random states in our format."""
    version, words, gauss = state["random_state"]
    kind, key, position, has_gauss, cached = state["numpy_random_seed"]
    captured: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(list(words), dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "bit_generator": kind,
            "state": {
                "key": {"dtype": "uint32", "values": torch.from_numpy(np.asarray(key).astype(np.int64))},
                "pos": int(position),
            },
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": state["torch_manual_seed"],
    }
    return captured
