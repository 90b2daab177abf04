"""Rules for the keys of Accelerate's configuration files that belong to no engine; an engine's are in its plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.config.rules import Rule, flag


def _only_yes(instead: str, *, changes_results: bool = False) -> Rule:
    """A switch that says nothing special while it is off."""
    return Rule(instead=instead, nothing=(False, "no", "No", "false", "False"), changes_results=changes_results)


def _precision_of_fp16(value: Any) -> Mapping[str, Any]:
    return {"mixed_precision": "fp16"} if flag(value) else {}


def _one(value: Any) -> Mapping[str, Any]:
    if value == 1:
        return {}
    raise ValueError("sequence parallelism has no axis of its own; leave it at 1, or use mesh.cp")


_CLOUD = Rule(instead="start the job by the cloud's own tools, with `drivetrain launch` inside")
_POD = Rule(instead="start `drivetrain launch` on every TPU host", changes_results=False)
_NO_CP = "mesh.cp alone says how many ranks share a sequence; the backend chooses how"
_COMPILE = Rule(
    instead="call torch.compile in the script", nothing=("NO", "no", False, "default"), changes_results=False
)

RULES: Mapping[str, Rule] = {
    "compute_environment": Rule(instead="only LOCAL_MACHINE has a meaning", nothing=("LOCAL_MACHINE",)),
    "main_training_function": Rule(why="`drivetrain launch` runs the whole script"),
    "same_network": Rule(why="main_process_ip has to be an address that every machine reaches, whatever the network"),
    "gpu_ids": Rule(to="accelerator_ids", nothing=("all",)),
    "fp16": Rule(into=_precision_of_fp16),
    "enable_cpu_affinity": _only_yes("start the launcher under numactl or taskset"),
    "num_cpu_threads_per_process": Rule(
        instead="set the environment variable OMP_NUM_THREADS", nothing=(0, 1), changes_results=False
    ),
    "downcast_bf16": _only_yes("set mixed_precision: bf16", changes_results=True),
    "command": _POD,
    "command_file": _POD,
    "commands": _POD,
    "tpu_env": Rule(instead="export these variables before `drivetrain launch`"),
    "tpu_name": _POD,
    "tpu_zone": _POD,
    "tpu_vm": _POD,
    "tpu_use_cluster": _only_yes(_POD.instead),
    "tpu_use_sudo": _only_yes(_POD.instead),
    "dynamo_backend": _COMPILE,
    "sagemaker_inputs_file": _CLOUD,
    "sagemaker_metrics_file": _CLOUD,
    "additional_args": _CLOUD,
    "base_job_name": _CLOUD,
    "ec2_instance_type": _CLOUD,
    "iam_role_name": _CLOUD,
    "image_uri": _CLOUD,
    "profile": _CLOUD,
    "py_version": _CLOUD,
    "pytorch_version": _CLOUD,
    "region": _CLOUD,
    "transformers_version": _CLOUD,
}
"""Keys at the top of the file that are not ours; those that are keep their meaning."""

_AXIS = "parallelism_config_"
_FP8 = Rule(why="it has a meaning only with mixed_precision: fp8, which is not supported")
_MPI = Rule(why="`mpirun python script.py` is started as it stands; the launcher is not part of it")
_IPEX = Rule(why="torch itself supports Intel devices")
_SP = Rule(why="it has a meaning only with parallelism_config_sp_size")

SECTIONS: Mapping[str, Mapping[str, Rule]] = {
    "parallelism_config": {
        f"{_AXIS}dp_replicate_size": Rule(to="mesh.dp_replicate"),
        f"{_AXIS}dp_shard_size": Rule(to="mesh.dp_shard"),
        f"{_AXIS}tp_size": Rule(to="mesh.tp"),
        f"{_AXIS}cp_size": Rule(to="mesh.cp"),
        f"{_AXIS}cp_backend": Rule(why=_NO_CP),
        f"{_AXIS}cp_comm_strategy": Rule(why=_NO_CP),
        f"{_AXIS}sp_size": Rule(into=_one),
        f"{_AXIS}sp_backend": _SP,
        f"{_AXIS}sp_seq_length": _SP,
        f"{_AXIS}sp_seq_length_is_variable": _SP,
        f"{_AXIS}sp_attn_implementation": _SP,
    },
    "fp8_config": {
        f"fp8_{name}": _FP8
        for name in (
            *("backend", "format", "interval", "margin", "override_linear_precision", "use_autocast_during_eval"),
            *("amax_history_len", "amax_history_length", "amax_compute_algo", "amax_compute_algorithm"),
            *("opt_level", "optimization_level", "enable_fsdp_float8_all_gather", "pad_inner_dim"),
        )
    },
    "ipex_config": {"ipex": _IPEX, "use_xpu": _IPEX, "ipex_fusion_enabled": _IPEX},
    "mpirun_config": {"mpirun_hostfile": _MPI, "mpirun_ccl": _MPI},
    "dynamo_config": {
        f"dynamo_{name}": _COMPILE
        for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    },
}
"""Sections that belong to no engine."""

UNSUPPORTED_VALUES: Mapping[str, Mapping[Any, str]] = {
    "mixed_precision": {"fp8": "fp8 is not supported; write bf16 (or fp16, or 'no')"},
}
"""Values of keys that are ours too, which Accelerate knows and we do not."""
