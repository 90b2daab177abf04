"""Keys of Accelerate's configuration files that are not ours: harmless values pass, others get a sentence.

``accelerate config`` writes every key, used or not. A file of it must read as it stands, so a key is accepted while it
holds the value that means "nothing special"; any other value asks for something that we would otherwise drop silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.config.problems import show

_NOTHING: tuple[Any, ...] = (None, "", [], {}, False, "no", "NO", "none")


@dataclass(frozen=True)
class _Foreign:
    """Values that mean nothing special, besides the empty ones, and what to write instead of any other."""

    harmless: tuple[Any, ...]
    instead: str
    empty: tuple[Any, ...] = _NOTHING


def _section(name: str) -> _Foreign:
    return _Foreign((), f"write a section '{name}:' with the backend's own keys")


_MESH = _Foreign((), "write the section 'mesh:' with pp, dp_replicate, dp_shard, cp and tp")
_TPU = _Foreign((), "start the script on each TPU host yourself")
_COMPILE = _Foreign((), "call torch.compile in the script")
_CLOUD = _Foreign((), "start the job by the cloud's own tools, with `drivetrain launch` inside")

FOREIGN: Mapping[str, _Foreign] = {
    "compute_environment": _Foreign(("LOCAL_MACHINE",), "only LOCAL_MACHINE has a meaning; leave the key out"),
    "main_training_function": _Foreign(("main",), "`drivetrain launch` runs the whole script; leave the key out"),
    "same_network": _Foreign((True,), "let main_process_ip be an address that every machine reaches", empty=(None,)),
    "gpu_ids": _Foreign(("all",), "set the environment variable CUDA_VISIBLE_DEVICES"),
    "enable_cpu_affinity": _Foreign((), "start the launcher under numactl or taskset"),
    "num_cpu_threads_per_process": _Foreign((), "set the environment variable OMP_NUM_THREADS"),
    "downcast_bf16": _Foreign((), "set mixed_precision: bf16"),
    "command_file": _TPU,
    "commands": _TPU,
    "tpu_env": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "dynamo_backend": _COMPILE,
    "dynamo_config": _COMPILE,
    "fsdp_config": _section("fsdp"),
    "deepspeed_config": _section("deepspeed"),
    "megatron_lm_config": _section("megatron"),
    "parallelism_config": _MESH,
    "fp8_config": _Foreign((), "fp8 is not supported; set mixed_precision: bf16"),
    "ipex_config": _Foreign((), "torch itself supports XPU devices; leave the key out"),
    "mpirun_config": _Foreign((), "start every machine with `drivetrain launch`; leave the key out"),
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


def complaint(key: str, value: Any) -> str | None:
    """A sentence when the value asks for something, ``None`` when it means nothing special. ``key`` is in FOREIGN."""
    foreign = FOREIGN[key]
    # `==` alone would take 0 for False and 1 for True.
    if any(value == each and type(value) is type(each) for each in (*foreign.harmless, *foreign.empty)):
        return None
    shown = "" if isinstance(value, (dict, list)) else f": {show(value)}"
    return f"{key}{shown} is not supported; {foreign.instead}"
