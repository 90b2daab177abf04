"""Public names for authors of backends.

Light names (descriptions, hooks, errors) import no torch; a name that needs torch is imported on first use,
so that ``plugin.py`` and ``backend.py`` of a plugin import from the same place.

Four modules beside this one have what few plugins need: ``drivetrain.api.engines`` for engines that replace what torch
does, ``drivetrain.api.config`` for a section of the configuration, ``drivetrain.api.accelerate`` for backends that
Accelerate has too, ``drivetrain.api.programs`` for commands, planners, launchers, trackers and converters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from drivetrain.lazy import on_first_use
from drivetrain.topology import Mesh, ProcessInfo, Topology

if TYPE_CHECKING:
    from drivetrain.backends import portable
    from drivetrain.backends.base import DistributedBackend
    from drivetrain.backends.local_gradients import LocalGradients
    from drivetrain.backends.replicated import ReplicatedBackend
    from drivetrain.backends.torch_engine import (
        TorchEngine,
        TorchTrainable,
        gradients,
        multiply_gradients,
        place_model,
        total_norm,
    )
    from drivetrain.distributed import collectives
    from drivetrain.distributed.process_group import ensure_process_group, pick_device
    from drivetrain.loop.gradient_hooks import GradientHook, hooks_of
    from drivetrain.loop.model import plain_state_dict
    from drivetrain.loop.precision import cast_parameters, dtype_of
    from drivetrain.loop.wrappers import original_module

__getattr__ = on_first_use(
    __name__,
    {
        "drivetrain.backends": ("portable",),
        "drivetrain.backends.base": ("DistributedBackend",),
        "drivetrain.backends.local_gradients": ("LocalGradients",),
        "drivetrain.backends.replicated": ("ReplicatedBackend",),
        "drivetrain.backends.torch_engine": (
            *("TorchEngine", "TorchTrainable", "gradients", "multiply_gradients", "place_model", "total_norm"),
        ),
        "drivetrain.distributed": ("collectives",),
        "drivetrain.distributed.process_group": ("ensure_process_group", "pick_device"),
        "drivetrain.loop.gradient_hooks": ("GradientHook", "hooks_of"),
        "drivetrain.loop.model": ("plain_state_dict",),
        "drivetrain.loop.precision": ("cast_parameters", "dtype_of"),
        "drivetrain.loop.wrappers": ("original_module",),
    },
)

__all__ = [
    "CONTRACT",
    "Backend",
    "BackendBlockedError",
    "BackendInfo",
    "Capabilities",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigError",
    "DistributedBackend",
    "DrivetrainError",
    "FileConfiguredBackend",
    "GradientHook",
    "LocalGradients",
    "Mesh",
    "PortableState",
    "PrecisionPolicy",
    "ProcessInfo",
    "Readiness",
    "ReduceOp",
    "ReplicatedBackend",
    "RunSettings",
    "StepResult",
    "TensorSpec",
    "Topology",
    "TorchEngine",
    "TorchTrainable",
    "Trainable",
    "UnsupportedError",
    "UsageError",
    "cast_parameters",
    "collectives",
    "dtype_of",
    "ensure_process_group",
    "gradients",
    "hookimpl",
    "hooks_of",
    "multiply_gradients",
    "original_module",
    "pick_device",
    "place_model",
    "plain_state_dict",
    "portable",
    "total_norm",
]
