"""The config section ``deepspeed:``: keys of its own, a DeepSpeed file, a DeepSpeed dictionary, or all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from drivetrain.api.config import Integer, Number
from drivetrain_deepspeed.aliases import read_settled, settled
from drivetrain_deepspeed.jsonfile import Keys
from drivetrain_deepspeed.vocabulary import mistakes


def _device(value: Any) -> Any:
    """YAML reads a bare ``no`` as False; Accelerate writes ``none``."""
    return "none" if value is False else value


Offload = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_device)]

_ZERO = "zero_optimization"
TYPED: Mapping[str, Keys] = {
    "zero_stage": (_ZERO, "stage"),
    "offload_optimizer": (_ZERO, "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": (_ZERO, "offload_optimizer", "nvme_path"),
    "offload_optimizer_pin_memory": (_ZERO, "offload_optimizer", "pin_memory"),
    "offload_param": (_ZERO, "offload_param", "device"),
    "offload_param_nvme_path": (_ZERO, "offload_param", "nvme_path"),
    "offload_param_pin_memory": (_ZERO, "offload_param", "pin_memory"),
    "zero3_gather_16bit_weights": (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    **{
        key: (_ZERO, key)
        for key in (
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "reduce_bucket_size",
            "allgather_partitions",
            "allgather_bucket_size",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_gradients",
        )
    },
    **{
        key: (key,)
        for key in ("gradient_clipping", "gradient_accumulation_steps", "communication_data_type", "steps_per_print")
    },
}
"""Path of each key of the section in DeepSpeed's own dictionary."""

_ACCELERATE = {
    "deepspeed_config_file": "config_file",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
    "zero3_save_16bit_model": "zero3_gather_16bit_weights",
}
"""Names of Accelerate's files, and ours."""


class DeepSpeedConfig(BaseModel):
    """Settings of DeepSpeed. A key that is null is left to the file, the dictionary, or DeepSpeed's own default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config_file: str | None = Field(None, description="DeepSpeed's JSON file; a relative path starts where you do.")
    config: dict[str, Any] | None = Field(None, description="The same as keys and values: DeepSpeed's dictionary.")
    zero_stage: Annotated[Integer, Field(ge=0, le=3)] | None = Field(
        None,
        description="What ranks share out: 1 optimizer states, 2 gradients too, 3 parameters too, 0 nothing; null: 2, "
        "or what the file or dictionary says.",
    )
    offload_optimizer: Offload | None = Field(
        None, description="Where optimizer states live and are updated: none (the device) or cpu; nvme is refused."
    )
    offload_optimizer_nvme_path: str | None = Field(None, description="Folder on a fast disk, for nvme.")
    offload_optimizer_pin_memory: bool | None = Field(None, description="Page-locked memory for faster copies.")
    offload_param: Offload | None = Field(
        None, description="Where parameters wait, in stage 3: none or cpu; nvme is refused."
    )
    offload_param_nvme_path: str | None = Field(None, description="Folder on a fast disk, for nvme.")
    offload_param_pin_memory: bool | None = Field(None, description="Page-locked memory for faster copies.")
    overlap_comm: bool | None = Field(None, description="Reduce gradients while backward goes on.")
    contiguous_gradients: bool | None = Field(None, description="Copy gradients into one buffer as they are made.")
    reduce_scatter: bool | None = Field(None, description="Reduce-scatter instead of all-reduce.")
    reduce_bucket_size: Integer | None = Field(None, gt=0, description="Gradient elements that are reduced at a time.")
    allgather_partitions: bool | None = Field(None, description="Collect updated parameters by all-gather.")
    allgather_bucket_size: Integer | None = Field(None, gt=0, description="Elements that are gathered at a time.")
    round_robin_gradients: bool | None = Field(None, description="Spread a rank's gradients for faster offloading.")
    sub_group_size: Integer | None = Field(None, gt=0, description="Stage 3: elements of one optimizer sub-step.")
    stage3_max_live_parameters: Integer | None = Field(
        None, ge=0, description="Stage 3: parameters that may be whole at a time."
    )
    stage3_max_reuse_distance: Integer | None = Field(
        None, ge=0, description="Stage 3: keep a parameter that is needed again within this many."
    )
    stage3_prefetch_bucket_size: Integer | None = Field(None, ge=0, description="Stage 3: parameters gathered ahead.")
    stage3_param_persistence_threshold: Integer | None = Field(
        None, ge=0, description="Stage 3: smaller parameters are never cut."
    )
    zero3_gather_16bit_weights: bool | None = Field(
        None, description="Stage 3: the engine's own save_16bit_model gathers; save_model does in any case."
    )
    zero_hpz_partition_size: Integer | None = Field(
        None, ge=1, description="Ranks of the secondary partition (ZeRO++)."
    )
    zero_quantized_weights: bool | None = Field(None, description="Quantise parameters on their way (ZeRO++).")
    zero_quantized_gradients: bool | None = Field(None, description="Quantise gradients on their way (ZeRO++).")
    gradient_clipping: Number | None = Field(
        None, ge=0, description="Global norm to which each step clips; the script's clip_grad_norm_ must agree."
    )
    gradient_accumulation_steps: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="Micro-batches between two optimizer steps, where neither script nor configuration says."
    )
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        None, description="Dtype in which gradients travel; null lets the precision policy decide."
    )
    steps_per_print: Integer | None = Field(None, ge=1, description="Log progress every so many steps; null: never.")

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """Full DeepSpeed dictionary, for scripts written for Accelerate; ``"auto"`` is not filled in."""
        from drivetrain_deepspeed.written import Written

        return Written(self).values

    @model_validator(mode="before")
    @classmethod
    def _names_of_accelerate(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        result: dict[str, Any] = {}
        for key, value in values.items():
            name = str(_ACCELERATE.get(key, key))
            if name in result or (name != key and name in values):
                raise ValueError(f"'{key}' and '{name}' are two names of one key; keep one")
            result[name] = value
        if result.pop("zero3_init_flag", False) not in (False, None):
            raise ValueError(
                "zero3_init_flag: construct the model in `with accelerator.init_empty_weights():` instead, which "
                "shares out its parameters from the start"
            )
        return result

    @field_validator("config_file")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            file = read_settled(value)
            _sound(mistakes(file.values, file.where))
        return value

    @field_validator("config")
    @classmethod
    def _agrees_with_the_file(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is not None:
            value = settled(value)
            _sound(mistakes(value, lambda keys: ".".join(("config", *keys))))
        if value is not None and info.data.get("config_file") is not None:
            file = read_settled(info.data["config_file"])
            for keys, mine in leaves(value):
                other = look_up(file.values, keys)
                if other is not MISSING and not same(mine, other):
                    raise ValueError(_two(".".join(keys), mine, ".".join(keys), other, file.where(keys)))
        return value

    @field_validator(*TYPED)
    @classmethod
    def _agrees(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if value is None:
            return value
        keys, name = TYPED[info.field_name], ".".join(TYPED[info.field_name])
        inline = look_up(info.data.get("config") or {}, keys)
        if inline is not MISSING and not same(value, inline):
            raise ValueError(_two(info.field_name, value, name, inline, "`config:` in this section"))
        if info.data.get("config_file") is not None:
            file = read_settled(info.data["config_file"])
            other = look_up(file.values, keys)
            if other is not MISSING and not same(value, other):
                raise ValueError(_two(info.field_name, value, name, other, file.where(keys)))
        return value

    @model_validator(mode="after")
    def _paths_of_disks(self) -> DeepSpeedConfig:
        for key in ("offload_optimizer", "offload_param"):
            if getattr(self, key) == "nvme" and getattr(self, f"{key}_nvme_path") is None and not self._elsewhere(key):
                raise ValueError(f"{key}: nvme needs {key}_nvme_path, a folder on a fast disk")
        return self

    def _elsewhere(self, key: str) -> bool:
        keys = TYPED[f"{key}_nvme_path"]
        file = read_settled(self.config_file).values if self.config_file is not None else {}
        return any(look_up(each, keys) is not MISSING for each in (self.config or {}, file))


MISSING: Any = object()
"""Returned by :func:`look_up` if there is no such key."""

AUTO = "auto"
"""The word of a file for "fill this in from the run"."""


def look_up(values: Mapping[str, Any], keys: Keys) -> Any:
    """The value at a place of nested mappings, or :data:`MISSING`."""
    here: Any = values
    for key in keys:
        if not isinstance(here, Mapping) or key not in here:
            return MISSING
        here = here[key]
    return here


def leaves(values: Mapping[str, Any], above: Keys = ()) -> list[tuple[Keys, Any]]:
    """Place and value of everything that is not itself keys and values; an empty mapping is a value."""
    found: list[tuple[Keys, Any]] = []
    for key, value in values.items():
        keys = (*above, str(key))
        found += leaves(value, keys) if isinstance(value, Mapping) and value else [(keys, value)]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values agree; ``"auto"`` agrees with everything, 1 is not true."""
    if any(isinstance(each, str) and each == AUTO for each in (one, other)):
        return True
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def show(value: Any) -> str:
    """A value as JSON writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else f'"{value}"' if isinstance(value, str) else str(value)


def _sound(found: list[str]) -> None:
    if found:
        raise ValueError("; ".join(found))


def _two(name: str, value: Any, other: str, its: Any, where: str) -> str:
    return f"{name}: {show(value)} contradicts {other}: {show(its)} ({where}); keep one, or make them equal"
