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

_DISPATCH = (
    *("AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "ModelHook", "OffloadedWeightsLoader"),
    *("SequentialHook", "UserCpuOffloadHook", "add_hook_to_module", "align_module_device", "attach_align_device_hook"),
    *("attach_align_device_hook_on_blocks", "attach_execution_device_hook", "check_device_map", "compute_module_sizes"),
    *("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "find_tied_parameters"),
    *("get_balanced_memory", "get_max_layer_size", "get_max_memory", "get_mixed_precision_context_manager"),
    *("has_offloaded_params", "infer_auto_device_map", "load_checkpoint_and_dispatch"),
    *("load_offloaded_weight", "named_module_tensors", "offload_state_dict", "offload_weight"),
    *("remove_hook_from_module", "remove_hook_from_submodules", "retie_parameters", "set_module_tensor_to_device"),
)

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(_DISPATCH, _BIG),
    "AORecipeKwargs": _FP8,
    "BnbQuantizationConfig": _QUANTISED,
    "FP8RecipeKwargs": _FP8,
    "MSAMPRecipeKwargs": _FP8,
    "TERecipeKwargs": _FP8,
    "SeedableRandomSampler": "Write DataLoader(..., shuffle=True): the order depends on the seed and the epoch alone.",
    "TorchContextParallelConfig": "Write the size in the configuration: mesh: {cp: 2}.",
    "TorchDynamoPlugin": "Write Accelerator(dynamo_backend=...), or call torch.compile(model) before prepare.",
    "TorchTensorParallelConfig": "Write the size in the configuration: mesh: {tp: 2}.",
    "TorchTensorParallelPlugin": "Write the size in the configuration: mesh: {tp: 2}.",
    "compile_regions": "Call block.compile() for each of the repeated blocks, before prepare.",
    "compile_regions_deepspeed": "Call block.compile() for each of the repeated blocks, before prepare.",
    "load_and_quantize_model": _QUANTISED,
    "load_fsdp_model": _SAVE,
    "load_fsdp_optimizer": _SAVE,
    "merge_fsdp_weights": "Run: drivetrain checkpoint export FOLDER.",
    "prepare_pippy": "Write mesh: {pp: 2} under a backend with pipelines, which runs the model in evaluation too.",
    "purge_accelerate_environment": "Write `with clear_environment():` around what must not see variables.",
    "save_fsdp_model": _SAVE,
    "save_fsdp_optimizer": _SAVE,
    "write_basic_config": "Run: drivetrain config --default.",
}
"""Absent names, with what to write instead."""


def refuse(name: str) -> Any:
    """Raise :class:`AbsentNameError` for one of :data:`INSTEAD`."""
    raise AbsentNameError(f"drivetrain has no {name!r}", cure=INSTEAD[name])
