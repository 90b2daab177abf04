"""Names of Accelerate that do not exist here, each with what to write instead. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.errors import AbsentNameError

_BIG = (
    "Models larger than a device are trained here, not dispatched: construct the model in "
    "`with accelerator.init_empty_weights():` under a backend that shares parameters out."
)
_FP8 = "fp8 is not supported; write mixed_precision: bf16."
_SAVE = "Write accelerator.save_state(FOLDER) and accelerator.load_state(FOLDER): one format under every backend."
_QUANTISED = "Quantise the model by its own library before prepare."

INSTEAD: Mapping[str, str] = {
    "AORecipeKwargs": _FP8,
    "BnbQuantizationConfig": _QUANTISED,
    "FP8RecipeKwargs": _FP8,
    "MSAMPRecipeKwargs": _FP8,
    "TERecipeKwargs": _FP8,
    "TorchContextParallelConfig": "Write the size in the configuration: mesh: {cp: 2}.",
    "TorchDynamoPlugin": "Write Accelerator(dynamo_backend=...), or call torch.compile(model) before prepare.",
    "TorchTensorParallelConfig": "Write the size in the configuration: mesh: {tp: 2}.",
    "TorchTensorParallelPlugin": "Write the size in the configuration: mesh: {tp: 2}.",
    "cpu_offload": _BIG,
    "cpu_offload_with_hook": _BIG,
    "disk_offload": _BIG,
    "dispatch_model": _BIG,
    "infer_auto_device_map": _BIG,
    "init_empty_weights": "Create the Accelerator first, then write `with accelerator.init_empty_weights():`.",
    "init_on_device": "Write `with torch.device(...):`.",
    "load_and_quantize_model": _QUANTISED,
    "load_checkpoint_and_dispatch": _BIG,
    "load_checkpoint_in_model": _BIG,
    "load_fsdp_model": _SAVE,
    "load_fsdp_optimizer": _SAVE,
    "merge_fsdp_weights": "Run: drivetrain checkpoint export FOLDER.",
    "prepare_pippy": "Write mesh: {pp: 2} under a backend with pipelines, which runs the model in evaluation too.",
    "save_fsdp_model": _SAVE,
    "save_fsdp_optimizer": _SAVE,
    "write_basic_config": "Run: drivetrain config --default.",
}
"""By name."""


def refuse(name: str) -> Any:
    """Raise :class:`AbsentNameError` for one of :data:`INSTEAD`."""
    raise AbsentNameError(f"drivetrain has no {name!r}", cure=INSTEAD[name])
