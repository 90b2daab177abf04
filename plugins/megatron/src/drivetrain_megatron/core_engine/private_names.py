"""Names inside of Megatron-Core that this engine reads, replaces or sets, checked when it starts.

The release is pinned to those that were tested (:data:`~drivetrain_megatron.core_engine.parallel_state.SUPPORTED`), so
this finds a modified build, or a release whose version number is wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from drivetrain.api import BackendBlockedError

TESTED = "0.16.1"
"""The release that ``locks/dev.txt`` holds."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "parallel_state": ("_GLOBAL_MEMORY_BUFFER", "_set_global_memory_buffer", "destroy_model_parallel"),
    "tensor_parallel.layers": ("linear_with_grad_accumulation_and_async_allreduce",),
    "tensor_parallel.random": (
        *("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"),
        *("_get_cuda_rng_state", "_set_cuda_rng_state"),
    ),
}
"""Private names by module of ``megatron.core``."""

_DISTRIBUTED_OPTIMIZER = (
    *("_copy_main_params_to_model_params", "_copy_model_grads_to_main_grads", "_get_model_param_range_map"),
)


def check() -> None:
    """Raise where the installed Megatron-Core lacks a name. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    for module, names in _NAMES.items():
        _check(importlib.import_module(f"megatron.core.{module}"), names)


def check_distributed_optimizer(optimizer: object) -> None:
    """Raise where Megatron-Core's distributed optimizer lacks a method. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    _check(optimizer, _DISTRIBUTED_OPTIMIZER)


def _check(owner: object, names: tuple[str, ...]) -> None:
    BackendBlockedError.check_names(owner, names, library="megatron-core", tested=TESTED, user="drivetrain-megatron")
