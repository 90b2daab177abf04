"""Lists the keys of DeepSpeed's dictionary, and those that are not supported. No torch, no engine.

DeepSpeed ignores unknown top-level keys; here a near miss is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain_deepspeed.jsonfile import Keys

KNOWN = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
        *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
        *("gradient_predivide_factor", "gradient_allreduce_op", "managed_gradient_accumulation", "disable_allgather"),
        *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "compile"),
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers"),
        *("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "checkpoint"),
        *(
            "activation_checkpointing",
            "disable_python_gc",
            "dataloader_drop_last",
            "datastates_ckpt",
            "vocabulary_size",
        ),
        *("hybrid_engine", "autotuning", "data_efficiency", "pipeline", "tensor_parallel", "expert_parallel"),
        *("sequence_parallel_size", "data_parallel_size", "use_data_before_expert_parallelism", "weight_quantization"),
        *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting"),
        *("nebula", "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
        *("zero_use_cpu_adam", "vocabulary_size"),
    )
)
"""Top-level keys, of older releases too."""

ZERO = frozenset(
    (
        *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
        *(
            "allgather_partitions",
            "allgather_bucket_size",
            "overlap_comm",
            "compute_grad_norm",
            "round_robin_gradients",
        ),
        *("load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow"),
        *("sub_group_size", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "leaf_module"),
        *("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        *("param_persistence_threshold", "stage3_param_persistence_threshold"),
        *("model_persistence_threshold", "stage3_model_persistence_threshold"),
        *("max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance"),
        *("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        *("module_granularity_threshold", "stage3_module_granularity_threshold"),
        *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
        *("allgather_sequential", "stage3_allgather_sequential", "stage3_gather_fp16_weights_on_model_save"),
        *("ignore_unused_parameters", "legacy_stage1", "parameter_alignment", "zero_hpz_partition_size"),
        *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply", "enable_sanity_checks"),
        *("log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory", "mics_shard_size"),
        *("mics_hierarchical_params_gather", "zeropp_loco_param"),
    )
)
"""Keys of ``zero_optimization``. DeepSpeed refuses others itself, without a line number or a suggestion."""

COMMENTS = ("_", "$", "//")
"""Prefixes of keys that are comments."""

_NOT_HERE = {
    "autotuning": "it starts the script many times with other settings; run it with DeepSpeed's own launcher",
    "data_efficiency": "it needs DeepSpeed's own data loader; remove it",
    "compile": "write model = torch.compile(model) in the script",
    "dataloader_drop_last": "the script's DataLoader decides; write DataLoader(..., drop_last=True)",
    "elasticity": "the launcher decides the number of processes; remove it",
    "expert_parallel": "no mesh axis exists for it; remove it",
    "hybrid_engine": "it is for generation inside of training; remove it",
    "managed_gradient_accumulation": "the accumulation window belongs to the script; remove it",
    "pipeline": "the backend 'megatron' has pipelines; remove it",
    "sequence_parallel_size": "the mesh is the configuration's; remove it",
    "tensor_parallel": "the backend 'megatron' has tensor parallelism; remove it",
    "amp": "set mixed_precision: bf16 (or fp16)",
    "compression_training": "DeepSpeed has removed it; remove it",
    "curriculum_learning": "DeepSpeed has removed it; choose the data in the script",
    "eigenvalue": "DeepSpeed has removed it; remove it",
    "graph_harvesting": "DeepSpeed has removed it; remove it",
    "nebula": "DeepSpeed has removed it; remove it",
    "progressive_layer_drop": "DeepSpeed has removed it; remove it",
    "quantize_training": "DeepSpeed has removed it; remove it",
    "sparse_attention": "DeepSpeed has removed it; remove it",
    "sparse_gradients": "DeepSpeed has removed it; nn.Embedding(..., sparse=True) needs no key",
    "zero_use_cpu_adam": "write offload_optimizer: cpu",
}
"""Unsupported keys if they are on, and what to write instead."""

_NOT_IN_ZERO = {
    "mics_shard_size": "DeepSpeed builds such a model by a context of its own; remove it",
    "zenflow": "its optimizer steps beside the script's; remove it",
}
"""The same of ``zero_optimization``."""

_FLOAT32 = "parameters, gradients and optimizer states are float32, as under every backend; remove it"
_NOT_IN_PRECISION = {
    ("bf16", "immediate_grad_update"): _FLOAT32,
    ("bf16", "bf16_master_weights_and_grads"): _FLOAT32,
    ("bf16", "bf16_optimizer_states"): _FLOAT32,
    ("fp16", "auto_cast"): _FLOAT32,
    ("fp16", "fp16_master_weights_and_grads"): _FLOAT32,
    ("torch_autocast", "lower_precision_safe_modules"): "gradients travel in float32, as the precision policy says; "
    "communication_data_type is what changes that",
}

_PRECISION = {
    "bf16": frozenset(
        {
            *("enabled", "immediate_grad_update", "check_grad_overflow"),
            *("bf16_master_weights_and_grads", "bf16_optimizer_states"),
        }
    ),
    "fp16": frozenset(
        {
            *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
            *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
        }
    ),
    "torch_autocast": frozenset({"enabled", "dtype", "lower_precision_safe_modules"}),
}
"""Keys of the sections that the core follows: DeepSpeed, which would refuse others, never sees these."""


def mistakes(values: Mapping[str, Any], where: Callable[[Keys], str]) -> list[str]:
    """Return the mistakes of a dictionary, one sentence each.

    Args:
        values: DeepSpeed's dictionary.
        where: in words, where the key at a place was written.
    """
    found = []
    for key, value in values.items():
        if key in _NOT_HERE and is_on(value):
            found.append(f"{key} ({where((key,))}) is not supported: {_NOT_HERE[key]}")
    found += _slips(values, (), KNOWN, where)
    zero = values.get("zero_optimization")
    if isinstance(zero, Mapping):
        found += _slips(zero, ("zero_optimization",), ZERO, where)
        found += [
            f"zero_optimization.{key} ({where(('zero_optimization', key))}) is not supported: {why}"
            for key, why in _NOT_IN_ZERO.items()
            if is_on(zero.get(key))
        ]
    for (section, key), why in _NOT_IN_PRECISION.items():
        part = values.get(section)
        if isinstance(part, Mapping) and is_on(part.get(key)):
            found.append(f"{section}.{key} ({where((section, key))}) is not supported: {why}")
    for section, known in _PRECISION.items():
        part = values.get(section)
        for key in part if isinstance(part, Mapping) else ():
            if key not in known and not key.startswith(COMMENTS):
                guess = difflib.get_close_matches(key, known, n=1)
                cure = f"did you mean '{guess[0]}'?" if guess else "remove it"
                found.append(f"unknown key '{section}.{key}' ({where((section, key))}); {cure}")
    if values.get("gradient_allreduce_op", "mean") != "mean":
        found.append(
            f"gradient_allreduce_op ({where(('gradient_allreduce_op',))}) is not supported: what a loss is divided by "
            "is the script's; remove it"
        )
    return found


def _slips(values: Mapping[str, Any], above: Keys, known: frozenset[str], where: Callable[[Keys], str]) -> list[str]:
    found = []
    for key in values:
        if key not in known and not key.startswith(COMMENTS):
            guess = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            if guess:
                found.append(f"unknown key '{key}' ({where((*above, key))}); did you mean '{guess[0]}'?")
    return found


def is_on(value: Any) -> bool:
    """Whether a value turns something on: ``false``, ``{}`` and ``{"enabled": false, ...}`` do not."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", any(is_on(each) for each in value.values())))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value > 0 and value != 1
    return value not in (None, False, "auto", [])


def without_requests(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary without keys of :data:`_NOT_HERE`, which DeepSpeed refuses even where they are off."""
    return {key: value for key, value in values.items() if key not in _NOT_HERE}
