"""Converts Accelerate's section ``deepspeed_config``; accepts ``DeepSpeedPlugin`` with Accelerate's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drivetrain.api import UsageError
from drivetrain.api.accelerate import Rule, flag, number, whole
from drivetrain_deepspeed.config import DeepSpeedConfig

_LAUNCH = "start every machine with `drivetrain launch`"
_AUTO = "auto"


def _device(value: Any) -> str:
    name = str(value).lower()
    if name not in ("none", "cpu", "nvme"):
        raise ValueError("write none, cpu or nvme")
    return name


def _clipping(value: Any) -> Mapping[str, Any]:
    return {} if value == _AUTO else {"deepspeed.gradient_clipping": number(value)}


def _accumulation(value: Any) -> Mapping[str, Any]:
    return {} if value == _AUTO else {"deepspeed.gradient_accumulation_steps": whole(value)}


RULES: Mapping[str, Rule] = {
    "zero_stage": Rule(to="deepspeed.zero_stage", convert=whole),
    "deepspeed_config_file": Rule(to="deepspeed.config_file", nothing=("none",)),
    "gradient_accumulation_steps": Rule(into=_accumulation),
    "gradient_clipping": Rule(into=_clipping, nothing=("none",)),
    "offload_optimizer_device": Rule(to="deepspeed.offload_optimizer", convert=_device, nothing=("none",)),
    "offload_optimizer_nvme_path": Rule(to="deepspeed.offload_optimizer_nvme_path", nothing=("none",)),
    "offload_param_device": Rule(to="deepspeed.offload_param", convert=_device, nothing=("none",)),
    "offload_param_nvme_path": Rule(to="deepspeed.offload_param_nvme_path", nothing=("none",)),
    "zero3_init_flag": Rule(
        instead="construct the model in `with accelerator.init_empty_weights():`, which shares out its parameters from "
        "the start",
        nothing=(False, "false"),
        changes_results=False,
    ),
    "zero3_save_16bit_model": Rule(to="deepspeed.zero3_gather_16bit_weights", convert=flag, nothing=(False, "false")),
    "deepspeed_multinode_launcher": Rule(instead=_LAUNCH, nothing=("standard",), changes_results=False),
    "deepspeed_hostfile": Rule(instead=_LAUNCH, nothing=("none",)),
    "deepspeed_inclusion_filter": Rule(instead=_LAUNCH, nothing=("none",)),
    "deepspeed_exclusion_filter": Rule(instead=_LAUNCH, nothing=("none",)),
    "deepspeed_moe_layer_cls_names": Rule(
        instead="call deepspeed.utils.set_z3_leaf_modules(model, [...]) before prepare", nothing=("none",)
    ),
}
"""Conversion rules by key of ``deepspeed_config``."""


def DeepSpeedPlugin(  # noqa: N802 (the name that scripts import)
    hf_ds_config: Mapping[str, Any] | str | Path | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | str | None = None,
    zero_stage: int | None = None,
    is_train_batch_min: bool = True,
    offload_optimizer_device: str | None = None,
    offload_param_device: str | None = None,
    offload_optimizer_nvme_path: str | None = None,
    offload_param_nvme_path: str | None = None,
    zero3_init_flag: bool | None = None,
    zero3_save_16bit_model: bool | None = None,
    **others: Any,
) -> DeepSpeedConfig:
    """The section ``deepspeed:`` from the arguments of Accelerate's class of this name.

    Args:
        hf_ds_config: DeepSpeed's dictionary, or the file that holds it.
        gradient_accumulation_steps: micro-batches between two optimizer steps.
        gradient_clipping: norm to which each step clips; ``"auto"``: that of the script's ``clip_grad_norm_``.
        zero_stage: 0 to 3.
        is_train_batch_min: ``True``: of several loaders the smallest batch size is the training one's.
        offload_optimizer_device: ``"none"``, ``"cpu"`` or ``"nvme"``.
        offload_param_device: the same for parameters.
        offload_optimizer_nvme_path: folder for ``"nvme"``.
        offload_param_nvme_path: the same for parameters.
        zero3_init_flag: construct the model in ``with accelerator.init_empty_weights():`` instead.
        zero3_save_16bit_model: as ``zero3_gather_16bit_weights`` of the section.
        others: further arguments of Accelerate's class, none of which has a meaning here.

    Raises:
        UsageError: a value that the section refuses, or an argument that has no meaning here.
    """
    given: dict[str, Any] = {
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": None if gradient_clipping == _AUTO else gradient_clipping,
        "zero_stage": zero_stage,
        "offload_optimizer": offload_optimizer_device,
        "offload_param": offload_param_device,
        "offload_optimizer_nvme_path": offload_optimizer_nvme_path,
        "offload_param_nvme_path": offload_param_nvme_path,
        "zero3_init_flag": zero3_init_flag,
        "zero3_gather_16bit_weights": zero3_save_16bit_model,
    }
    if isinstance(hf_ds_config, Mapping):
        given["config"] = dict(hf_ds_config)
    elif hf_ds_config is not None:
        given["config_file"] = str(hf_ds_config)
    unknown = sorted(key for key, value in others.items() if value is not None)
    if unknown or not is_train_batch_min:
        raise UsageError(
            f"DeepSpeedPlugin takes no {', '.join(unknown) or 'is_train_batch_min=False'} here",
            cure="Leave it out; what DeepSpeed itself reads goes into hf_ds_config.",
        )
    try:
        return DeepSpeedConfig(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        found = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors(include_url=False))
        raise UsageError(f"DeepSpeedPlugin: {found}", cure="Change its arguments.") from error
