"""Common parts of DeepSpeed's checkpoint files: names, replacements of DeepSpeed's classes, other states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import CheckpointError
from drivetrain_convert import ForeignCheckpoint, Source, load_pickle

OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
})  # fmt: skip
"""Keys that ``save_checkpoint`` itself writes to the model's states; the rest is the script's ``client_state``."""


class Record:
    """An object of a class of DeepSpeed's, as its attributes."""


class Stage(int):
    """A ZeRO stage, which DeepSpeed pickles as an enumeration."""


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _stage_of_name(enumeration: Any, name: str) -> Stage:
    """A stage as Python 3.11.2, of Debian 12, pickles a member of an enumeration: by ``getattr``."""
    if enumeration is not Stage:
        raise ValueError(f"getattr of {enumeration}")
    return Stage(_STAGES[name])


STAND_INS: dict[str, Callable[..., Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Record,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Record,
    "deepspeed.utils.tensor_fragment.fragment_address": Record,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "builtins.getattr": _stage_of_name,
}
"""Replacements of pickled classes, so that reading a checkpoint imports and executes nothing of DeepSpeed."""


def load(path: Path) -> Any:
    """One of its files; tensors are mapped. Raises :class:`CheckpointError`, also for what is not known as harmless."""
    return load_pickle(path, STAND_INS)


def add_surroundings(found: ForeignCheckpoint, states: Mapping[str, Any], scaler: Any) -> None:
    """Take the scheduler, the loss scale, counters and the script's own values.

    Args:
        found: gets them.
        states: the model's states.
        scaler: the loss scaler's record, or ``None``.
    """
    if isinstance(states.get("lr_scheduler"), Mapping):
        found.objects["scheduler.0"] = dict(states["lr_scheduler"])
    parts = vars(scaler) if isinstance(scaler, Record) else {}
    if parts.get("dynamic"):
        factor, window = float(parts["scale_factor"]), int(parts["scale_window"])
        found.scaler = {
            "scale": float(parts["cur_scale"]),
            "growth_factor": factor,
            "backoff_factor": 1.0 / factor,
            "growth_interval": window,
            "_growth_tracker": max(0, int(parts["cur_iter"]) - int(parts["last_overflow_iter"]) - 1) % window,
        }
    for key in ("global_steps", "global_samples", "skipped_steps"):
        if isinstance(states.get(key), int):
            found.notes[key] = states[key]
    for key in ("data_sampler", "random_ltd"):
        if states.get(key) is not None:
            found.left_out.append(f"{key}: belongs to DeepSpeed's own data pipeline")
    for key, value in states.items():
        if key in OWN_KEYS:
            continue
        if value is None or isinstance(value, (bool, int, float, str)):
            found.notes[f"client_state.{key}"] = value
        else:
            found.left_out.append(
                f"client_state[{key!r}]: a {type(value).__name__} of the script's own, which stays in the source"
            )


def add_module(
    found: ForeignCheckpoint,
    states: Mapping[str, Any],
    masters: Mapping[str, Source],
    others: Mapping[str, Source] | None = None,
) -> None:
    """Take the model: master values where there are some, else what the module's state dict holds.

    Args:
        found: gets it.
        states: the model's states.
        masters: trained parameters.
        others: further tensors that the module's state dict does not hold (ZeRO-3's frozen parameters).
    """
    tied = {str(alias): str(first) for alias, first in (states.get("shared_params") or {}).items()}
    tensors: dict[str, Any] = {}
    module = states.get("module") or {}
    for name, value in module.items():
        whole = masters.get(name) or (others or {}).get(name)
        if name in tied:
            continue
        if whole is not None:
            tensors[name] = whole
        elif isinstance(value, Tensor) and (value.numel() or name in (states.get("buffer_names") or ())):
            tensors[name] = value
        elif isinstance(value, Tensor):
            found.left_out.append(f"{name}: trained by no optimizer and partitioned, so ZeRO-3 did not save it")
        else:
            found.left_out.append(f"{name}: no tensor (get_extra_state of a module)")
    tensors |= {name: source for name, source in {**masters, **(others or {})}.items() if name not in tensors}
    found.add_model(tensors, tied)
    if masters:
        known = {*masters, *tied, *(states.get("buffer_names") or ())}
        found.ungrouped += [name for name in found.models[-1] if name not in known]


def groups_by_name(inner: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups by name: DeepSpeed's hold numbers of flat buffers."""
    return [
        {
            **{key: value for key, value in group.items() if not key.startswith("_ds_")},
            "params": [name for number in group["params"] for name in shapes[number]],
        }
        for group in inner["param_groups"]
    ]


def frozen_fragments(models: Sequence[Path], states: Mapping[str, Any]) -> dict[str, Source]:
    """ZeRO-3's parameters that are not trained, out of every rank's file."""
    shapes = states.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    fragments = [load(path)["frozen_param_fragments"] for path in models]
    return {
        name: Source(
            name,
            fragments[0][name].dtype,
            tuple(shape),
            partial(
                join_parts, [each[name] for each in fragments], 0, -(-math.prod(shape) // len(fragments)), tuple(shape)
            ),
        )
        for name, shape in shapes.items()
    }


def join_range(parts: list[Tensor], start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """A range of the row of all ranks' parts."""
    pieces, at = [], 0
    for part in parts:
        low, high = max(start, at), min(stop, at + part.numel())
        if low < high:
            pieces.append(part[low - at : high - at])
        at += part.numel()
    return _shaped(pieces, shape)


def join_parts(parts: list[Tensor], at: int, size: int, shape: tuple[int, ...]) -> Tensor:
    """A parameter of which each rank holds ``size`` elements, the last ones padding."""
    left, pieces = math.prod(shape), []
    for part in parts:
        pieces.append(part[at : at + min(size, left)])
        left -= pieces[-1].numel()
    return _shaped(pieces, shape)


def _shaped(pieces: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    found = sum(piece.numel() for piece in pieces)
    if found != math.prod(shape):
        raise CheckpointError(
            f"a parameter of shape {shape} has {found} elements in the files",
            cure="Fetch the files of all ranks: each holds a part.",
        )
    whole = torch.cat(pieces) if len(pieces) != 1 else pieces[0]
    return whole.view(shape)
