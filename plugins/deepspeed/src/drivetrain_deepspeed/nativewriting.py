"""Writes a checkpoint in the format of ``engine.save_checkpoint``: ZeRO 0 to 3, for any world size.

DeepSpeed must be installed, since its files hold objects of its classes. The layout is that of DeepSpeed's defaults
(``round_robin_gradients`` and ``parameter_alignment`` off). Buffers of the ranks are files while they are filled, so
that one tensor at a time is in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drivetrain.api import CheckpointError
from drivetrain.api.programs import pip_line
from drivetrain_convert import SavedModel
from drivetrain_deepspeed.nativeflat import Flat, Rooms, flats_of

OPTIONS = {
    "zero_stage": "0, 1, 2 or 3; default 2",
    "world_size": "how many processes will load it; default: as many as saved it",
    "precision": "of the engine that will load it: no, bf16 or fp16; default no",
    "sub_group_size": "zero_optimization.sub_group_size of that engine, for stage 3; default 1e9",
}
_IMPLEMENTATION = {"foreach": None, "capturable": False, "fused": None}
"""Keys of torch's parameter groups that select an implementation; they are not saved."""


def write_shards(saved: SavedModel, target: Path, options: Mapping[str, str]) -> list[str]:
    """Write the folder; see :meth:`drivetrain.api.CheckpointFormat.write`.

    Raises:
        CheckpointError: an option makes no sense, DeepSpeed is not installed, or the optimizer's state cannot be laid
            out as DeepSpeed does.
    """
    stage = _number(options, "zero_stage", 2, (0, 1, 2, 3))
    world_size = _number(options, "world_size", saved.world_size)
    precision = options.get("precision", "no")
    if precision not in ("no", "bf16", "fp16") or (stage == 0 and precision != "no"):
        raise CheckpointError(
            f"precision={precision} with zero_stage={stage} is not written",
            cure="Use precision=no, bf16 or fp16; with zero_stage=0 only precision=no.",
        )
    if len(saved.optimizers) != 1:
        raise CheckpointError(
            f"the model has {len(saved.optimizers)} optimizers, DeepSpeed's checkpoints hold one",
            cure="`drivetrain checkpoint export` writes a model without optimizer.",
        )
    theirs = _theirs()
    tag = f"global_step{saved.step}"
    folder = target / tag
    folder.mkdir()
    rooms = Rooms(target / ".rooms")
    frozen = _frozen(saved)
    flats = flats_of(saved, frozen, stage, world_size, _number(options, "sub_group_size", 10**9)) if stage else []
    common = _common(saved, frozen, flats, stage, world_size, theirs)
    if stage == 3:
        _write_partitioned(saved, folder, common, rooms, frozen, world_size)
    else:
        module = {name: rooms.keep(f"model.{name}", saved) for name in _names(saved)}
        module |= {alias: module[first] for alias, first in saved.extra.get("tied", {}).items() if first in module}
        if stage == 2:
            common["frozen_param_fragments"] = OrderedDict((name, module[name]) for name in frozen)
        common["module"] = module | _extra_states(saved)
        common["optimizer"] = _whole_optimizer(saved, rooms) if stage == 0 else None
        torch.save(common, folder / "mp_rank_00_model_states.pt")
        del module, common
        rooms.clear()
    filled = [flat.fill(saved, rooms) for flat in flats]
    prefix = "bf16_" if precision == "bf16" else ""
    for rank in range(world_size if stage else 0):
        shard = {
            "optimizer_state_dict": _shard(saved, flats, filled, rank, stage, theirs),
            "ds_config": {},
            "ds_version": theirs["version"],
        }
        torch.save(shard, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    del filled
    rooms.close()
    (target / "latest").write_text(tag, encoding="utf-8")
    return _left_out(saved)


def _shard(
    saved: SavedModel,
    flats: Sequence[Flat],
    filled: Sequence[Mapping[str, Any]],
    rank: int,
    stage: int,
    theirs: Mapping[str, Any],
) -> dict[str, Any]:
    """One rank's part of the optimizer."""
    state: dict[int, dict[str, Any]] = {}
    for index, slots in enumerate(filled):
        own = {slot: value[rank] if isinstance(value, list) else value for slot, value in slots.items()}
        own.pop("master")
        if own:
            state[index] = own
    groups = [
        {
            **_IMPLEMENTATION,
            **{key: value for key, value in group.items() if key != "params"},
            "params": [index for index, flat in enumerate(flats) if flat.group == number],
        }
        for number, group in enumerate(saved.optimizers[0])
        if any(flat.group == number for flat in flats)
    ]
    masters = [slots["master"][rank] for slots in filled]
    inner = {"state": state, "param_groups": groups}
    shard: dict[str, Any] = {
        "loss_scaler": _loss_scaler(saved, theirs),
        "dynamic_loss_scale": bool(saved.extra.get("loss_scaler")),
        "overflow": False,
        "zero_stage": theirs["stage"](stage),
        "ds_version": theirs["version"],
    }
    if stage == 3:
        return shard | {
            "partition_count": flats[0].world_size,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }
    paddings = [flat.padding(rank) for flat in flats]
    return shard | {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [
            master[: master.numel() - padding] for master, padding in zip(masters, paddings, strict=True)
        ],
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(flat.shapes) for flat in flats],
        "partition_count": [flat.world_size for flat in flats],
        "param_slice_mappings": [
            OrderedDict((name, theirs["address"](numel=numel, start=start)) for name, start, numel in flat.pieces(rank))
            for flat in flats
        ],
    }


def _write_partitioned(
    saved: SavedModel, folder: Path, common: dict[str, Any], rooms: Rooms, frozen: Sequence[str], world_size: int
) -> None:
    """Add ZeRO-3's model states: parameters are empty, frozen ones are in fragments, buffers are full."""
    trained = {name for group in saved.optimizers[0] for name in group["params"]}
    parameters = trained.union(frozen)
    module: dict[str, Any] = {}
    fragments: dict[str, list[Any]] = {}
    for name in _names(saved):
        source = saved.tensors[f"model.{name}"]
        if name not in parameters:
            module[name] = rooms.keep(f"model.{name}", saved)
            continue
        module[name] = torch.empty(0, dtype=source.dtype)
        if name in frozen:
            flat = Flat(-1, OrderedDict([(name, source.shape)]), world_size, interleaved=True)
            fragments[name] = flat.scatter({name: source}, source.dtype, rooms)
    module |= {alias: module[first] for alias, first in saved.extra.get("tied", {}).items() if first in module}
    module |= _extra_states(saved)
    for rank in range(world_size):
        own = OrderedDict((name, parts[rank]) for name, parts in fragments.items())
        states = {**common, "module": module, "frozen_param_fragments": own, "optimizer": None}
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def _common(
    saved: SavedModel,
    frozen: Sequence[str],
    flats: Sequence[Flat],
    stage: int,
    world_size: int,
    theirs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entries of the model's states besides tensors."""
    trained = {name for group in saved.optimizers[0] for name in group["params"]}
    shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in flat.shapes.items()) for flat in flats]
    still = OrderedDict((name, torch.Size(saved.tensors[f"model.{name}"].shape)) for name in frozen)
    return {
        "buffer_names": [name for name in _names(saved) if name not in trained and name not in frozen],
        "param_shapes": shapes if stage else None,
        "frozen_param_shapes": still if stage >= 2 else None,
        "frozen_param_fragments": None,
        "shared_params": dict(saved.extra.get("tied", {})) if stage else None,
        "lr_scheduler": saved.objects.get("scheduler.0"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": saved.step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": theirs["version"],
    }


def _whole_optimizer(saved: SavedModel, rooms: Rooms) -> dict[str, Any]:
    """The optimizer's ``state_dict``, as torch numbers it."""
    numbers = {name: number for number, name in enumerate(n for group in saved.optimizers[0] for n in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for key in saved.tensors:
        if key.startswith("optim."):
            name, _, slot = key.removeprefix("optim.").rpartition(".")
            kind = saved.extra.get("numbers", {}).get(key)
            value = rooms.keep(key, saved)
            state.setdefault(numbers[name], {})[slot] = value.item() if kind else value
    groups = [
        {**_IMPLEMENTATION, **group, "params": [numbers[name] for name in group["params"]]}
        for group in saved.optimizers[0]
    ]
    return {"state": state, "param_groups": groups}


def _frozen(saved: SavedModel) -> list[str]:
    """Parameters that are not trained."""
    said = saved.extra.get("frozen")
    if said is not None:
        return [name for name in _names(saved) if name in set(said)]
    stepped = {key.removeprefix("optim.").rpartition(".")[0] for key in saved.tensors if key.startswith("optim.")}
    held = [name for group in saved.optimizers[0] for name in group["params"]]
    unknown = saved.extra.get("ungrouped", ())
    return [name for name in _names(saved) if name in unknown or (stepped and name in held and name not in stepped)]


def _names(saved: SavedModel) -> list[str]:
    return [key.removeprefix("model.") for key in saved.tensors if key.startswith("model.")]


def _extra_states(saved: SavedModel) -> dict[str, Any]:
    return {f"{path}._extra_state".lstrip("."): value for path, value in saved.extra.get("modules", {}).items()}


def _loss_scaler(saved: SavedModel, theirs: Mapping[str, Any]) -> Any:
    state = saved.extra.get("loss_scaler")
    if not state:
        return theirs["static"](1.0)
    scaler = theirs["dynamic"](
        init_scale=state["scale"],
        scale_window=int(state["growth_interval"]),
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=False,
    )
    scaler.cur_iter = int(state["_growth_tracker"])
    return scaler


def _left_out(saved: SavedModel) -> list[str]:
    sentences = ["random states: DeepSpeed's checkpoints have no place for them"]
    for name in saved.objects:
        if name == "scheduler.0":
            sentences.append(
                "scheduler.0 is there as lr_scheduler, which DeepSpeed loads if it was given the scheduler"
            )
        else:
            sentences.append(f"{name}: DeepSpeed's checkpoints have no place for it")
    return sentences


def _number(options: Mapping[str, str], key: str, default: int, among: Sequence[int] = ()) -> int:
    text = options.get(key)
    if text is None:
        return default
    try:
        number = int(float(text))
    except ValueError:
        number = -1
    if number < (0 if among else 1) or (among and number not in among):
        raise CheckpointError(f"{key}={text} makes no sense", cure=f"{key} is {OPTIONS[key]}.")
    return number


def _theirs() -> dict[str, Any]:
    """DeepSpeed's classes that its files hold. Raises :class:`CheckpointError` without DeepSpeed."""
    try:
        from drivetrain_deepspeed import quiet

        version = quiet.load("cpu").__version__
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError as problem:
        raise CheckpointError(
            f"writing DeepSpeed's checkpoints needs DeepSpeed: {problem}",
            cure=f"Type: {pip_line('deepspeed')}. Reading them works without.",
        ) from problem
    return {
        "version": version,
        "static": LossScaler,
        "dynamic": DynamicLossScaler,
        "stage": ZeroStageEnum,
        "address": fragment_address,
    }
