"""Drivetrain: one PyTorch training loop, any distributed backend.

Importing this package does not import torch; each public name is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from drivetrain.compat.paths import AcceleratePaths

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.checkpoint import save_object as save
    from drivetrain.compat.functions import (
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        compare_versions,
        init_empty_weights,
        init_on_device,
        is_compiled_module,
        is_peft_model,
        is_torch_version,
        load_checkpoint_in_model,
        prepare_data_loader,
        str_to_bool,
    )
    from drivetrain.compat.state import (
        AcceleratorState,
        PartialState,
        is_initialized,
        wait_for_everyone,
    )
    from drivetrain.config import load_config
    from drivetrain.data.loader import DataLoaderDispatcher, DataLoaderShard, already_sharded, skip_first_batches
    from drivetrain.data.metrics import gather
    from drivetrain.distributed.memory import clear_device_cache, find_executable_batch_size, release_memory
    from drivetrain.distributed.nested import (
        broadcast,
        broadcast_object_list,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from drivetrain.distributed.rng import set_seed, synchronize_rng_state, synchronize_rng_states
    from drivetrain.distributed.trees import (
        concatenate,
        find_batch_size,
        honor_type,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )
    from drivetrain.distributed_type import DistributedType
    from drivetrain.errors import CollectiveMismatchError as DistributedOperationException
    from drivetrain.kwargs import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ParallelismConfig,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from drivetrain.launch.environment import clear_environment, patch_environment
    from drivetrain.launch.notebook import debug_launcher, notebook_launcher
    from drivetrain.logging import get_logger
    from drivetrain.loop.ema import EMA
    from drivetrain.loop.gradient_state import GradientState
    from drivetrain.loop.local_sgd import LocalSGD
    from drivetrain.loop.optimizer import PreparedOptimizer as AcceleratedOptimizer
    from drivetrain.loop.optimizer import PreparedScheduler as AcceleratedScheduler
    from drivetrain.loop.placeholders import DummyOptim, DummyScheduler
    from drivetrain.loop.precision import convert_outputs_to_fp32, convert_to_fp32
    from drivetrain.loop.train_step import TrainStepOutput
    from drivetrain.loop.wrappers import extract_model_from_parallel
    from drivetrain.progress import tqdm
    from drivetrain.tracking import GeneralTracker, register_tracker_class

__version__ = "0.1.0"

sys.meta_path.append(AcceleratePaths())

_NAMES = {
    "accelerator": ("Accelerator",),
    "compat.functions": (
        *("SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "compare_versions", "init_empty_weights", "init_on_device"),
        *("is_compiled_module", "is_peft_model", "is_torch_version", "load_checkpoint_in_model", "prepare_data_loader"),
        "str_to_bool",
    ),
    "compat.state": ("AcceleratorState", "PartialState", "is_initialized", "wait_for_everyone"),
    "config": ("load_config",),
    "data.loader": ("DataLoaderDispatcher", "DataLoaderShard", "already_sharded", "skip_first_batches"),
    "data.metrics": ("gather",),
    "distributed.memory": ("clear_device_cache", "find_executable_batch_size", "release_memory"),
    "distributed.nested": ("broadcast", "broadcast_object_list", "gather_object", "pad_across_processes", "reduce"),
    "distributed.rng": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "distributed.trees": (
        *("concatenate", "find_batch_size", "honor_type", "recursively_apply", "send_to_device", "slice_tensors"),
    ),
    "distributed_type": ("DistributedType",),
    "kwargs": (
        *("AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DistributedDataParallelKwargs"),
        *("GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "ParallelismConfig"),
        *("ProfileKwargs", "ProjectConfiguration"),
    ),
    "launch.environment": ("clear_environment", "patch_environment"),
    "launch.notebook": ("debug_launcher", "notebook_launcher"),
    "logging": ("get_logger",),
    "loop.ema": ("EMA",),
    "loop.gradient_state": ("GradientState",),
    "loop.local_sgd": ("LocalSGD",),
    "loop.placeholders": ("DummyOptim", "DummyScheduler"),
    "loop.precision": ("convert_outputs_to_fp32", "convert_to_fp32"),
    "loop.train_step": ("TrainStepOutput",),
    "loop.wrappers": ("extract_model_from_parallel",),
    "progress": ("tqdm",),
    "tracking": ("GeneralTracker", "register_tracker_class"),
}
"""Public names by the module, below this package, that they are imported from."""

_HOME = {
    **{name: module for module, names in _NAMES.items() for name in names},
    "AcceleratedOptimizer": "loop.optimizer:PreparedOptimizer",
    "AcceleratedScheduler": "loop.optimizer:PreparedScheduler",
    "DistributedOperationException": "errors:CollectiveMismatchError",
    "save": "checkpoint:save_object",
}


def __getattr__(name: str) -> Any:
    if name in globals():  # Asked for by way of drivetrain.utils.
        return globals()[name]
    if name not in _HOME:
        return _further(name)
    home, _, own_name = _HOME[name].partition(":")
    value = getattr(import_module(f"drivetrain.{home}"), own_name or name)
    globals()[name] = value
    return value


def _further(name: str) -> Any:
    """Look up further names: those of ``drivetrain.utils``, of plugins, and of Accelerate's that raise with advice."""
    if name.startswith("is_") and name.endswith("_available"):
        return import_module("drivetrain.compat.availability").probe(name)
    absent = import_module("drivetrain.compat.absent")
    if name in absent.INSTEAD:
        return absent.refuse(name)
    if not name[:1].isupper():  # A submodule, or what Python itself asks for.
        if name in import_module("drivetrain.compat.paths").ATTRIBUTES:
            return import_module(f"drivetrain.{name}")
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return import_module("drivetrain.registry").get_registry().named_object(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "EMA",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TrainStepOutput",
    "__version__",
    "already_sharded",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "clear_environment",
    "compare_versions",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "debug_launcher",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "honor_type",
    "init_empty_weights",
    "init_on_device",
    "is_compiled_module",
    "is_initialized",
    "is_peft_model",
    "is_torch_version",
    "load_checkpoint_in_model",
    "load_config",
    "notebook_launcher",
    "pad_across_processes",
    "patch_environment",
    "prepare_data_loader",
    "recursively_apply",
    "reduce",
    "register_tracker_class",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
