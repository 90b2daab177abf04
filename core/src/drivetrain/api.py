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
    from drivetrain import checkpoint
    from drivetrain.backends import portable
    from drivetrain.backends.deferred_init import Recording, deferred, temporary
    from drivetrain.backends.elementwise import ELEMENTWISE, check_elementwise
    from drivetrain.backends.local_gradients import LocalGradients, is_taken
    from drivetrain.backends.local_steps import STEPPED_LOCALLY, laid_out_as, steps_locally
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
    from drivetrain.distributed import collectives, trees
    from drivetrain.distributed.device import pick_device
    from drivetrain.distributed.process_group import ensure_process_group
    from drivetrain.distributed.rng import DeviceGenerator, register_device_generator
    from drivetrain.distributed.same_order import SameOrder
    from drivetrain.loop.buffers import Buffers
    from drivetrain.loop.model import call_plainly, plain_state_dict
    from drivetrain.loop.placeholders import DummyOptim, DummyScheduler
    from drivetrain.loop.precision import autocast, cast_parameters, dtype_of
    from drivetrain.registry import get_registry

_HEAVY = {
    "ELEMENTWISE": "drivetrain.backends.elementwise:ELEMENTWISE",
    "STEPPED_LOCALLY": "drivetrain.backends.local_steps:STEPPED_LOCALLY",
    "Buffers": "drivetrain.loop.buffers:Buffers",
    "DeviceGenerator": "drivetrain.distributed.rng:DeviceGenerator",
    "DummyOptim": "drivetrain.loop.placeholders:DummyOptim",
    "DummyScheduler": "drivetrain.loop.placeholders:DummyScheduler",
    "LocalGradients": "drivetrain.backends.local_gradients:LocalGradients",
    "Recording": "drivetrain.backends.deferred_init:Recording",
    "SameOrder": "drivetrain.distributed.same_order:SameOrder",
    "checkpoint": "drivetrain.checkpoint",
    "TorchEngine": "drivetrain.backends.torch_engine:TorchEngine",
    "TorchTrainable": "drivetrain.backends.torch_engine:TorchTrainable",
    "autocast": "drivetrain.loop.precision:autocast",
    "call_plainly": "drivetrain.loop.model:call_plainly",
    "cast_parameters": "drivetrain.loop.precision:cast_parameters",
    "check_elementwise": "drivetrain.backends.elementwise:check_elementwise",
    "collectives": "drivetrain.distributed.collectives",
    "deferred": "drivetrain.backends.deferred_init:deferred",
    "dtype_of": "drivetrain.loop.precision:dtype_of",
    "ensure_process_group": "drivetrain.distributed.process_group:ensure_process_group",
    "get_registry": "drivetrain.registry:get_registry",
    "gradients": "drivetrain.backends.torch_engine:gradients",
    "is_taken": "drivetrain.backends.local_gradients:is_taken",
    "laid_out_as": "drivetrain.backends.local_steps:laid_out_as",
    "load_config": "drivetrain.config.load:load_config",
    "multiply_gradients": "drivetrain.backends.torch_engine:multiply_gradients",
    "original_module": "drivetrain.backends.torch_engine:original_module",
    "pick_device": "drivetrain.distributed.device:pick_device",
    "place_model": "drivetrain.backends.torch_engine:place_model",
    "plain_state_dict": "drivetrain.loop.model:plain_state_dict",
    "portable": "drivetrain.backends.portable",
    "register_device_generator": "drivetrain.distributed.rng:register_device_generator",
    "steps_locally": "drivetrain.backends.local_steps:steps_locally",
    "temporary": "drivetrain.backends.deferred_init:temporary",
    "total_norm": "drivetrain.backends.torch_engine:total_norm",
    "trees": "drivetrain.distributed.trees",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'drivetrain.api' has no attribute {name!r}")
    module, _, attribute = _HEAVY[name].partition(":")
    value = import_module(module)
    return getattr(value, attribute) if attribute else value


__all__ = [
    "CONTRACT",
    "ELEMENTWISE",
    "STEPPED_LOCALLY",
    "Backend",
    "BackendBlockedError",
    "BackendInfo",
    "Buffers",
    "Capabilities",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigError",
    "DeviceGenerator",
    "DrivetrainError",
    "DummyOptim",
    "DummyScheduler",
    "FileConfiguredBackend",
    "LocalGradients",
    "Mesh",
    "PortableState",
    "PrecisionPolicy",
    "ProcessInfo",
    "Readiness",
    "Recording",
    "ReduceOp",
    "Rule",
    "RunSettings",
    "SameOrder",
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
    "check_elementwise",
    "checkpoint",
    "collectives",
    "deferred",
    "dtype_of",
    "ensure_process_group",
    "flag",
    "get_registry",
    "gradients",
    "hookimpl",
    "is_taken",
    "laid_out_as",
    "load_config",
    "multiply_gradients",
    "number",
    "original_module",
    "pick_device",
    "place_model",
    "plain_state_dict",
    "portable",
    "register_device_generator",
    "section_from_arguments",
    "steps_locally",
    "temporary",
    "total_norm",
    "trees",
    "whole",
]
