"""Public names for authors of backends.

Light names (descriptions, hooks, errors) import no torch; a name that needs torch is imported on first use,
so that ``plugin.py`` and ``backend.py`` of a plugin import from the same place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from drivetrain.backend import (
    CONTRACT,
    Backend,
    BackendInfo,
    Capabilities,
    FileConfiguredBackend,
    PortableState,
    PrecisionPolicy,
    Readiness,
    ReduceOp,
    RunSettings,
    StepResult,
    TensorSpec,
    Trainable,
)
from drivetrain.compat.config_rules import Rule, flag, number, section_from_arguments, whole
from drivetrain.errors import (
    BackendBlockedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
    DrivetrainError,
    UnsupportedError,
    UsageError,
)
from drivetrain.hookspecs import hookimpl
from drivetrain.topology import Mesh, ProcessInfo, Topology

if TYPE_CHECKING:
    from drivetrain import checkpoint, pictures
    from drivetrain.backends import portable
    from drivetrain.backends.base import DistributedBackend
    from drivetrain.backends.local_gradients import LocalGradients, is_taken
    from drivetrain.backends.replicated import ReplicatedBackend
    from drivetrain.backends.torch_engine import (
        TorchEngine,
        TorchTrainable,
        gradients,
        multiply_gradients,
        original_module,
        place_model,
        total_norm,
    )
    from drivetrain.config.load import load_config
    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.distributed import collectives, trees
    from drivetrain.distributed.process_group import ensure_process_group, pick_device
    from drivetrain.distributed.rank_numbers import numbers_coordinate
    from drivetrain.distributed.rng import DeviceGenerator, register_device_generator
    from drivetrain.launch.dry_run import CommandLine
    from drivetrain.launch.plan import LaunchPlan
    from drivetrain.loop.buffers import Buffers
    from drivetrain.loop.gradient_hooks import GradientHook, hooks_of, try_hook
    from drivetrain.loop.model import call_plainly, plain_state_dict
    from drivetrain.loop.placeholders import DummyOptim, DummyScheduler
    from drivetrain.loop.precision import autocast, cast_parameters, dtype_of, policy_for
    from drivetrain.registry import get_registry, pip_line
    from drivetrain.tracking.jsonl import json_value

_HEAVY = {
    "drivetrain": ("checkpoint", "pictures"),
    "drivetrain.backends": ("portable",),
    "drivetrain.backends.base": ("DistributedBackend",),
    "drivetrain.backends.local_gradients": ("LocalGradients", "is_taken"),
    "drivetrain.backends.replicated": ("ReplicatedBackend",),
    "drivetrain.backends.torch_engine": (
        *("TorchEngine", "TorchTrainable", "gradients", "multiply_gradients", "original_module", "place_model"),
        "total_norm",
    ),
    "drivetrain.config.load": ("load_config",),
    "drivetrain.config.resolved": ("ResolvedConfig",),
    "drivetrain.distributed": ("collectives", "trees"),
    "drivetrain.distributed.process_group": ("ensure_process_group", "pick_device"),
    "drivetrain.distributed.rank_numbers": ("numbers_coordinate",),
    "drivetrain.distributed.rng": ("DeviceGenerator", "register_device_generator"),
    "drivetrain.launch.dry_run": ("CommandLine",),
    "drivetrain.launch.plan": ("LaunchPlan",),
    "drivetrain.loop.buffers": ("Buffers",),
    "drivetrain.loop.gradient_hooks": ("GradientHook", "hooks_of", "try_hook"),
    "drivetrain.loop.model": ("call_plainly", "plain_state_dict"),
    "drivetrain.loop.placeholders": ("DummyOptim", "DummyScheduler"),
    "drivetrain.loop.precision": ("autocast", "cast_parameters", "dtype_of", "policy_for"),
    "drivetrain.registry": ("get_registry", "pip_line"),
    "drivetrain.tracking.jsonl": ("json_value",),
}
"""Names that need torch, or are seldom needed, by the module that has them; some are modules themselves."""

_HOME = {name: module for module, names in _HEAVY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'drivetrain.api' has no attribute {name!r}")
    home = import_module(_HOME[name])
    return getattr(home, name) if hasattr(home, name) else import_module(f"{_HOME[name]}.{name}")


__all__ = [
    "CONTRACT",
    "Backend",
    "BackendBlockedError",
    "BackendInfo",
    "Buffers",
    "Capabilities",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CommandLine",
    "ConfigError",
    "DeviceGenerator",
    "DistributedBackend",
    "DrivetrainError",
    "DummyOptim",
    "DummyScheduler",
    "FileConfiguredBackend",
    "GradientHook",
    "LaunchPlan",
    "LocalGradients",
    "Mesh",
    "PortableState",
    "PrecisionPolicy",
    "ProcessInfo",
    "Readiness",
    "ReduceOp",
    "ReplicatedBackend",
    "ResolvedConfig",
    "Rule",
    "RunSettings",
    "StepResult",
    "TensorSpec",
    "Topology",
    "TorchEngine",
    "TorchTrainable",
    "Trainable",
    "UnsupportedError",
    "UsageError",
    "autocast",
    "call_plainly",
    "cast_parameters",
    "checkpoint",
    "collectives",
    "dtype_of",
    "ensure_process_group",
    "flag",
    "get_registry",
    "gradients",
    "hookimpl",
    "hooks_of",
    "is_taken",
    "json_value",
    "load_config",
    "multiply_gradients",
    "number",
    "numbers_coordinate",
    "original_module",
    "pick_device",
    "pictures",
    "pip_line",
    "place_model",
    "plain_state_dict",
    "policy_for",
    "portable",
    "register_device_generator",
    "section_from_arguments",
    "total_norm",
    "trees",
    "try_hook",
    "whole",
]
