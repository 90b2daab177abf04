"""Reads universal checkpoints: the output of DeepSpeed's ``ds_to_universal``, one folder per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.api import CheckpointError
from drivetrain_convert import ForeignCheckpoint, Source
from drivetrain_deepspeed.natives import add_module, add_surroundings, frozen_fragments, groups_by_name, load

_INDEX = Path("zero") / "optimizer_state.pt"


def is_universal(folder: Path) -> bool:
    """Whether this tag folder is one."""
    return (folder / _INDEX).is_file()


def read_universal(folder: Path) -> ForeignCheckpoint:
    """Read such a tag folder. Tensors stay mapped.

    Raises:
        CheckpointError: a file is missing or damaged, or something in one is not known as harmless.
    """
    index = load(folder / _INDEX)
    models = sorted(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=_rank)
    states = load(models[0] if models else folder / "mp_rank_00_model_states.pt")
    shapes = {name: tuple(shape) for group in states["param_shapes"] for name, shape in group.items()}
    inner = index.get("optimizer_state_dict", index)
    common: Mapping[str, Any] = next(iter(inner.get("state", {}).values()), {})
    found = ForeignCheckpoint("a universal checkpoint of DeepSpeed")
    masters: dict[str, Source] = {}
    others: dict[str, Source] = {}
    state: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "zero").iterdir()):
        if not (path / "fp32.pt").is_file():
            continue
        name = path.name
        (masters if name in shapes else others)[name] = _source(path / "fp32.pt", name, shapes.get(name))
        if name not in shapes:
            continue
        files = {file.stem: file for file in sorted(path.glob("*.pt")) if file.stem != "fp32"}
        state[name] = {slot: _slot(file, name, shapes[name]) for slot, file in files.items()}
        for slot, value in common.items():
            if not (isinstance(value, Tensor) and value.dim()):
                state[name].setdefault(slot, value)
    missing = sorted(set(shapes) - set(masters))
    if missing:
        raise CheckpointError(
            f"there is no fp32.pt for {', '.join(missing[:6])}",
            whose=str(folder / "zero"),
            cure="Fetch the whole folder, or let ds_to_universal.py write it again.",
        )
    found.optimizers.append({"state": state, "param_groups": groups_by_name(inner, states["param_shapes"])})
    add_module(found, states, masters, others | (frozen_fragments(models, states) if models else {}))
    add_surroundings(found, states, index.get("loss_scaler"))
    return found


def _slot(path: Path, name: str, shape: tuple[int, ...]) -> Any:
    value = _tensor(load(path))
    return value if not isinstance(value, Tensor) or not value.dim() else _source(path, name, shape)


def _source(path: Path, name: str, shape: tuple[int, ...] | None) -> Source:
    """One file's tensor. ZeRO-3's are flat and get their shape back; those of model parallelism have their own."""
    value = _tensor(load(path))
    shape = shape if shape is not None and math.prod(shape) == value.numel() else tuple(value.shape)
    return Source(name, value.dtype, shape, partial(_produce, path, shape))


def _produce(path: Path, shape: tuple[int, ...]) -> Tensor:
    tensor: Tensor = _tensor(load(path)).detach()
    return tensor.view(shape)


def _tensor(saved: Any) -> Any:
    return saved["param"] if isinstance(saved, Mapping) else saved


def _rank(path: Path) -> int:
    return int(path.name.split("_")[3])
