"""Reads checkpoints of ``engine.save_checkpoint``, all ranks' files together: ZeRO 0 to 3, any world size.

Shapes and order of the flat buffers are in the files themselves. Tensors stay mapped; a parameter is assembled when it
is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.api import CheckpointError
from drivetrain_convert import ForeignCheckpoint, Source
from drivetrain_deepspeed.natives import (
    add_module,
    add_surroundings,
    frozen_fragments,
    groups_by_name,
    join_parts,
    join_range,
    load,
)

_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?(optim|model)_states\.pt")


def read_shards(folder: Path) -> ForeignCheckpoint:
    """Read a tag folder.

    Raises:
        CheckpointError: written by several model-parallel ranks or with experts, a rank's file is missing or damaged,
            or something in one is not known as harmless.
    """
    models, optims = _rank_files(folder, "model"), _rank_files(folder, "optim")
    _refuse(folder)
    states = load(models[0] if models else folder / "mp_rank_00_model_states.pt")
    if int(states.get("mp_world_size") or 1) > 1:
        raise _parallel(folder)
    if not optims:
        return _stage0(states)
    _check_complete(optims, int(states["dp_world_size"]), folder)
    shards = [load(path)["optimizer_state_dict"] for path in optims]
    stage = int(shards[0].get("zero_stage", 1))  # Stage 1 in bfloat16 with float32 accumulation does not record it.
    found = ForeignCheckpoint(f"a checkpoint of DeepSpeed, ZeRO-{stage} on {len(shards)} process(es)")
    flats = _stage3(shards) if stage == 3 else _stage12(shards, states)
    masters: dict[str, Source] = {}
    state: dict[str, dict[str, Any]] = {}
    for shapes, flat in zip(states["param_shapes"], flats, strict=True):
        masters |= flat.sources(shapes, flat.masters)
        slots = {slot: _slot(flat, shapes, parts) for slot, parts in flat.slots.items()}
        for name in shapes:
            state[name] = {slot: each[name] for slot, each in slots.items()}
    inner = shards[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    found.optimizers.append(
        {"state": _with_step(state, inner), "param_groups": groups_by_name(inner, states["param_shapes"])}
    )
    others = frozen_fragments(models, states) if stage == 3 else None
    add_module(found, states, masters, others)
    add_surroundings(found, states, shards[0].get("loss_scaler"))
    return found


@dataclass
class _Flat:
    """One flat buffer over all ranks.

    Args:
        masters: each rank's part.
        slots: each rank's part of each slot, or the ranks' common number.
        interleaved: ranks hold a part of each parameter (ZeRO-3), not a part of the row of parameters.
        gaps: elements of padding after each parameter.
    """

    masters: list[Tensor]
    slots: dict[str, Any]
    interleaved: bool
    gaps: Sequence[int]

    def sources(self, shapes: Mapping[str, Sequence[int]], parts: list[Tensor]) -> dict[str, Source]:
        """Each parameter of buffers that are laid out like this one."""
        found, at = {}, 0
        for number, (name, shape) in enumerate(shapes.items()):
            size = math.prod(shape)
            if self.interleaved:
                size = -(-size // len(parts))
                cut = partial(join_parts, parts, at, size, tuple(shape))
            else:
                cut = partial(join_range, parts, at, at + size, tuple(shape))
            found[name] = Source(name, parts[0].dtype, tuple(shape), cut)
            at += size + (self.gaps[number] if self.gaps else 0)
        return found


def _slot(flat: _Flat, shapes: Mapping[str, Sequence[int]], parts: Any) -> dict[str, Any]:
    return flat.sources(shapes, parts) if isinstance(parts, list) else dict.fromkeys(shapes, parts)


def _stage12(shards: Sequence[Mapping[str, Any]], states: Mapping[str, Any]) -> list[_Flat]:
    base = shards[0]["base_optimizer_state"]
    if not isinstance(base, Mapping):
        raise CheckpointError(
            "the optimizer's states are in the form of zero_optimization.elastic_checkpoint, which is not read",
            cure="Save with elastic_checkpoint: false.",
        )
    flats = []
    for index, _ in enumerate(states["param_shapes"]):
        masters = [shard["single_partition_of_fp32_groups"][index].detach() for shard in shards]
        states_of = [shard["base_optimizer_state"]["state"].get(index, {}) for shard in shards]
        gaps = (shards[0].get("param_alignment_paddings") or {index: ()})[index]
        flats.append(_Flat(masters, _slots(states_of, masters), False, gaps))
    return flats


def _stage3(shards: Sequence[Mapping[str, Any]]) -> list[_Flat]:
    flats = []
    for index, _ in enumerate(shards[0]["fp32_flat_groups"]):
        masters = [shard["fp32_flat_groups"][index].detach() for shard in shards]
        states_of = [shard["optimizer_state_dict"]["state"].get(index, {}) for shard in shards]
        flats.append(_Flat(masters, _slots(states_of, masters), True, ()))
    return flats


def _slots(states: Sequence[Mapping[str, Any]], masters: Sequence[Tensor]) -> dict[str, Any]:
    """Each slot's parts, trimmed to the master values' lengths, or the number that all ranks have."""
    found: dict[str, Any] = {}
    for slot, first in states[0].items():
        if isinstance(first, Tensor) and first.dim():
            found[slot] = [state[slot][: master.numel()] for state, master in zip(states, masters, strict=True)]
        else:
            found[slot] = first
    return found


def _stage0(states: Mapping[str, Any]) -> ForeignCheckpoint:
    found = ForeignCheckpoint("a checkpoint of DeepSpeed without ZeRO")
    add_module(found, states, {})
    inner = states.get("optimizer")
    if isinstance(inner, Mapping) and "param_groups" in inner:
        found.optimizers.append(inner)
    elif inner is not None:
        found.left_out.append("the optimizer: DeepSpeed's own wrapper of low precision without ZeRO, which is not read")
    add_surroundings(found, states, None)
    return found


def _with_step(state: dict[str, dict[str, Any]], inner: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Older fused optimizers of DeepSpeed count in the parameter group, not for each parameter."""
    counted = [group["step"] for group in inner["param_groups"] if "step" in group]
    for slots in state.values() if counted else ():
        if slots and "step" not in slots:
            slots["step"] = counted[0]
    return state


def _rank_files(folder: Path, kind: str) -> list[Path]:
    found: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = _RANK.fullmatch(path.name)
        if match and match[3] == kind:
            found[int(match[2]), int(match[1])] = path
    if any(model_parallel for model_parallel, _ in found):
        raise _parallel(folder)
    return [path for _, path in sorted(found.items())]


def _check_complete(optims: Sequence[Path], world_size: int, folder: Path) -> None:
    if len(optims) != world_size:
        raise CheckpointError(
            f"{len(optims)} file(s) with the optimizer's states are there, {world_size} were written",
            whose=str(folder),
            cure="Bring the files of all nodes together in this folder.",
        )


def _refuse(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    if any("expert" in name for name in names):
        raise CheckpointError(
            "checkpoints with experts in files of their own are not read",
            whose=str(folder),
            cure="Load it with the program that wrote it, and save the whole state_dict() of the model by torch.save.",
        )
    if any(name.startswith("layer_") for name in names):
        raise _parallel(folder)


def _parallel(folder: Path) -> CheckpointError:
    return CheckpointError(
        "written by a model-parallel or pipelined job, whose tensors are not joined here",
        whose=str(folder),
        cure="Make it universal first (python -m deepspeed.checkpoint.ds_to_universal), then convert that.",
    )
