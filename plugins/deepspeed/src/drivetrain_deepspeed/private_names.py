"""Attributes of DeepSpeed's engine and ZeRO optimizers that this plugin reads, replaces or sets.

Most are in no document of DeepSpeed's and may have another name in its next release. Where one was only read, that
would be an ``AttributeError`` in the middle of a step; where one is set, or read with a default, a wrong number. So all
are looked up when an engine has been made, before anything of it is used or replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from drivetrain.api import BackendBlockedError

TESTED = "0.19.8"
"""The release that ``locks/dev.txt`` holds."""

TESTED_TORCH = "2.13.0"

_WHO: dict[str, Any] = {"library": "deepspeed", "tested": TESTED, "user": "drivetrain-deepspeed"}

_ENGINE = (
    *("_backward_epilogue", "_backward_prologue", "_backward_prologue_per_tensor", "_config"),
    *("_forward_epilogue", "_forward_prologue", "_running_engine_backward", "_running_engine_backward_count"),
    *("basic_optimizer", "is_gradient_accumulation_boundary", "module_forward_post_hook", "module_forward_pre_hook"),
    *("set_gradient_accumulation_boundary", "torch_autocast_z0_gradscaler", "zero_grad", "zero_optimization_stage"),
)

_ZERO = (
    *("_epilogue_ran_this_backward", "_grad_acc_hooks", "_optimizer_step", "averaged_gradients"),
    *("clear_backward_seen_flag", "custom_loss_scaler", "external_loss_scale", "get_param_id", "ipg_buckets"),
    *("micro_step_id", "optimizer", "overflow", "torch_autocast_gradscaler", "zero_grad"),
)
"""Attributes of the optimizers of stages 1 to 3."""

_ZERO_1_AND_2 = (
    *("_hp_optimizer_states_linked", "_link_all_hp_params", "all_grad_tensors", "bit16_groups", "cpu_offload"),
    *("get_gradient_for_reduction", "overlap_comm", "parallel_partitioned_bit16_groups", "params_already_reduced"),
    *("params_in_partition", "partition_gradients", "real_dp_process_group", "reduce_bucket_size"),
    *("reduce_gradients", "reduce_ipg_grads", "reduce_ready_partitions_and_remove_grads", "round_robin_bit16_groups"),
    *("round_robin_bit16_padding", "setup_buckets", "single_partition_of_fp32_groups"),
)
_ZERO_1_AND_2_OFFLOADED = (
    *("_offload_accumulated_param_ids", "_restore_cpu_offload_grad_to_gpu", "accumulated_grads_in_cpu"),
    *("async_inplace_copy_grad_to_fp32_buffer_from_gpu", "norm_for_param_grads", "set_norm_for_param_grad_in_gpu"),
    "update_offload_overflow_tracker_for_param_grad",
)

_PARTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
_GATHER = "_PartitionedParameterCoordinator__all_gather_params"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
RELEASES = "_PartitionedParameterCoordinator__params_to_release"
_ZERO_3 = (
    *("_offload_boundary_param_ids", "_reassign_or_swap_out_partitioned_parameters", "checkpoint_event_epilogue"),
    *("checkpoint_event_prologue", "fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat"),
    *("grad_partitions_flat_buffer", "grad_position", "offload_optimizer", "parameter_offload"),
    *("sub_group_to_group_id", _PARTS, _REDUCE),
)
_ZERO_3_OFFLOADED = (
    *("_offload_grad_partition_at_boundary", "_swap_out_offload_fp32_gradients", "norm_for_param_grads"),
    "subgroup_to_device",
)
_PARAMETER_3 = (
    *("all_gather", "ds_active_sub_modules", "ds_id", "ds_numel", "ds_persist", "ds_process_group", "ds_shape"),
    *("ds_status", "ds_tensor", "partition", "partition_numel"),
)
"""Attributes of a parameter that stage 3 partitions."""

_PARAMETER = ("_dp_group",)
"""Attributes of a trained parameter under stages 1 and 2."""

_PACKAGE: Mapping[str, tuple[str, ...]] = {
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.comm.torch": ("build_shm_op",),
    "deepspeed.runtime.torch_autocast": ("TORCH_AUTOCAST_DTYPE", "TORCH_AUTOCAST_INITIALIZED"),
    "deepspeed.runtime.zero.linear": ("zero3_linear_wrap",),
    "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
    "deepspeed.utils.groups": ("_release_process_group_references",),
}
"""Names in modules."""
_INIT = ("_convert_to_deepspeed_param", "_post_init_method", "_zero_init_param", "get_partition_dp_group")
"""Attributes of the class ``zero.Init``."""


def check_package(package: Any) -> None:
    """Raise where the imported package lacks a name that is used before there is an engine.

    Raises:
        BackendBlockedError: it does.
    """
    _check(package.zero.Init, _INIT)
    _check(package.DeepSpeedEngine, ("_broadcast_model",))
    _check(importlib.import_module("deepspeed.comm.torch").TorchBackend, ("barrier",))
    _check(importlib.import_module(COORDINATOR).PartitionedParameterCoordinator, (RELEASES,))
    for module, names in _PACKAGE.items():
        _check(importlib.import_module(module), names)


def saved_tensor_hooks() -> Callable[[], object]:
    """Return a function that tells the hooks on saved tensors that are in place, ``None`` where there are none.

    Raises:
        BackendBlockedError: torch lacks what tells them. Releases that need it are older than the tested one.
    """
    found: Any = torch._C  # noqa: SLF001 (torch has no public way)
    who: dict[str, Any] = {"library": "torch", "tested": TESTED_TORCH, "user": "drivetrain-deepspeed"}
    BackendBlockedError.check_names(found, ("_autograd",), **who)
    owner = found._autograd  # noqa: SLF001
    BackendBlockedError.check_names(owner, ("_top_saved_tensors_default_hooks",), **who)
    return partial(owner._top_saved_tensors_default_hooks, False)  # noqa: SLF001


def check_engine(engine: Any) -> None:
    """Raise where a new engine, its ZeRO optimizer or one of its parameters lacks a name.

    Raises:
        BackendBlockedError: it does.
    """
    _check(engine, _ENGINE)
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if not stage:
        return
    _check(zero, _ZERO)
    if stage < 3:
        _check(zero, _ZERO_1_AND_2)
        _check(zero, _ZERO_1_AND_2_OFFLOADED if zero.cpu_offload else ())
        _check(zero.bit16_groups[0][0], _PARAMETER)
    else:
        _check(zero, _ZERO_3)
        _check(zero, _ZERO_3_OFFLOADED if zero.offload_optimizer else ())
        _check(
            zero.parameter_offload, ("forward_hooks", "get_param_coordinator", "pre_sub_module_backward_function")
        )
        _check(zero.parameter_offload.get_param_coordinator(), (_GATHER,))
        _check(zero.fp16_groups[0][0], _PARAMETER_3)
        _check(engine.module, ("ds_external_parameters", "ds_id"))


def _check(owner: object, names: tuple[str, ...]) -> None:
    BackendBlockedError.check_names(owner, names, **_WHO)
