"""Drivetrain: one PyTorch training loop, any distributed backend.

Importing this package imports no torch; each public name brings what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.checkpoint import save_object as save
    from drivetrain.config import load_config
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
    from drivetrain.launch.notebook import debug_launcher, notebook_launcher
    from drivetrain.launch.variables import clear_environment, patch_environment
    from drivetrain.logging import get_logger
    from drivetrain.progress import tqdm
    from drivetrain.runtime.at_hand import (
        AcceleratorState,
        GradientState,
        extract_model_from_parallel,
        is_initialized,
        wait_for_everyone,
    )
    from drivetrain.runtime.ema import EMA
    from drivetrain.runtime.float32 import convert_outputs_to_fp32, convert_to_fp32
    from drivetrain.runtime.loading import already_sharded, skip_first_batches
    from drivetrain.runtime.loading.kinds import DataLoaderDispatcher, DataLoaderShard
    from drivetrain.runtime.local_sgd import LocalSGD
    from drivetrain.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
    from drivetrain.runtime.nested import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from drivetrain.runtime.optimizer import PreparedOptimizer as AcceleratedOptimizer
    from drivetrain.runtime.partial_state import PartialState
    from drivetrain.runtime.placeholders import DummyOptim, DummyScheduler
    from drivetrain.runtime.rng import set_seed, synchronize_rng_state, synchronize_rng_states
    from drivetrain.runtime.scheduler import PreparedScheduler as AcceleratedScheduler
    from drivetrain.runtime.train_step import TrainStepOutput
    from drivetrain.runtime.trees import (
        concatenate,
        find_batch_size,
        honor_type,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )
    from drivetrain.tracking import GeneralTracker, register_tracker_class

__version__ = "0.1.0"

_HOME = {
    "EMA": "runtime.ema",
    "AcceleratedOptimizer": "runtime.optimizer:PreparedOptimizer",
    "AcceleratedScheduler": "runtime.scheduler:PreparedScheduler",
    "Accelerator": "accelerator",
    "AcceleratorState": "runtime.at_hand",
    "AutocastKwargs": "kwargs",
    "DDPCommunicationHookType": "kwargs",
    "DataLoaderConfiguration": "kwargs",
    "DataLoaderDispatcher": "runtime.loading.kinds",
    "DataLoaderShard": "runtime.loading.kinds",
    "DistributedDataParallelKwargs": "kwargs",
    "DistributedOperationException": "errors:CollectiveMismatchError",
    "DistributedType": "distributed_type",
    "DummyOptim": "runtime.placeholders",
    "DummyScheduler": "runtime.placeholders",
    "GeneralTracker": "tracking",
    "GradScalerKwargs": "kwargs",
    "GradientAccumulationPlugin": "kwargs",
    "GradientState": "runtime.at_hand",
    "InitProcessGroupKwargs": "kwargs",
    "LocalSGD": "runtime.local_sgd",
    "ParallelismConfig": "kwargs",
    "PartialState": "runtime.partial_state",
    "ProfileKwargs": "kwargs",
    "ProjectConfiguration": "kwargs",
    "TrainStepOutput": "runtime.train_step",
    "already_sharded": "runtime.loading",
    "broadcast": "runtime.nested",
    "broadcast_object_list": "runtime.nested",
    "clear_device_cache": "runtime.memory",
    "clear_environment": "launch.variables",
    "concatenate": "runtime.trees",
    "convert_outputs_to_fp32": "runtime.float32",
    "convert_to_fp32": "runtime.float32",
    "debug_launcher": "launch.notebook",
    "extract_model_from_parallel": "runtime.at_hand",
    "find_batch_size": "runtime.trees",
    "find_executable_batch_size": "runtime.memory",
    "gather": "runtime.nested",
    "gather_object": "runtime.nested",
    "get_logger": "logging",
    "honor_type": "runtime.trees",
    "is_initialized": "runtime.at_hand",
    "load_config": "config",
    "notebook_launcher": "launch.notebook",
    "pad_across_processes": "runtime.nested",
    "patch_environment": "launch.variables",
    "recursively_apply": "runtime.trees",
    "reduce": "runtime.nested",
    "register_tracker_class": "tracking",
    "release_memory": "runtime.memory",
    "save": "checkpoint:save_object",
    "send_to_device": "runtime.trees",
    "set_seed": "runtime.rng",
    "skip_first_batches": "runtime.loading",
    "slice_tensors": "runtime.trees",
    "synchronize_rng_state": "runtime.rng",
    "synchronize_rng_states": "runtime.rng",
    "tqdm": "progress",
    "wait_for_everyone": "runtime.at_hand",
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
    """Names that are too many to list, that plugins bring, or that do not exist here and say so."""
    if name.startswith("is_") and name.endswith("_available"):
        return import_module("drivetrain.runtime.availability").probe(name)
    absent = import_module("drivetrain.absent")
    if name in absent.INSTEAD:
        return absent.refuse(name)
    if not name[:1].isupper():  # A submodule, or what Python itself asks for.
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return import_module("drivetrain.brought").brought(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "EMA",
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
    "is_initialized",
    "load_config",
    "notebook_launcher",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "register_tracker_class",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
