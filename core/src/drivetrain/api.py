"""Public names for authors of backends.

Light names (descriptions, hooks, errors) cost nothing; a name that needs torch is imported when it is first asked for,
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
    Feeding,
    PortableState,
    PrecisionPolicy,
    ProcessGroupSettings,
    Readiness,
    ReduceOp,
    RunSettings,
    Statement,
    StepResult,
    TensorSpec,
    Trainable,
    always_ready,
)
from drivetrain.config.rules import Rule, flag, number, section_from_arguments, whole
from drivetrain.errors import (
    BackendBlockedError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    DrivetrainError,
    UnsupportedError,
    UsageError,
)
from drivetrain.hookspecs import hookimpl
from drivetrain.topology import AXES, DATA_AXES, Mesh, Place, Topology

if TYPE_CHECKING:
    from drivetrain.checkpoint import foreign
    from drivetrain.checkpoint.flatshard import FlatShard
    from drivetrain.checkpoint.formats import CheckpointFormat
    from drivetrain.checkpoint.saved import SavedModel
    from drivetrain.config.load import load_config
    from drivetrain.registry import get_registry
    from drivetrain.runtime import clipping, collectives, local_steps, optimizer_kinds, portable, precision, trees
    from drivetrain.runtime.buffers import Buffers
    from drivetrain.runtime.deferred import Recording, deferred
    from drivetrain.runtime.device import pick_device
    from drivetrain.runtime.engine import TorchEngine
    from drivetrain.runtime.local_gradients import LocalGradients, is_taken
    from drivetrain.runtime.model import call_plainly, plain_state_dict
    from drivetrain.runtime.placeholders import DummyOptim, DummyScheduler
    from drivetrain.runtime.placing import original_module, place_model
    from drivetrain.runtime.process_group import ProcessGroupHandle, ensure_process_group
    from drivetrain.runtime.rng import DeviceGenerator, register_device_generator
    from drivetrain.runtime.temporary import temporary

_HEAVY = {
    "Buffers": "drivetrain.runtime.buffers:Buffers",
    "CheckpointFormat": "drivetrain.checkpoint.formats:CheckpointFormat",
    "SavedModel": "drivetrain.checkpoint.saved:SavedModel",
    "foreign": "drivetrain.checkpoint.foreign",
    "DeviceGenerator": "drivetrain.runtime.rng:DeviceGenerator",
    "DummyOptim": "drivetrain.runtime.placeholders:DummyOptim",
    "DummyScheduler": "drivetrain.runtime.placeholders:DummyScheduler",
    "FlatShard": "drivetrain.checkpoint.flatshard:FlatShard",
    "load_config": "drivetrain.config.load:load_config",
    "clipping": "drivetrain.runtime.clipping",
    "collectives": "drivetrain.runtime.collectives",
    "local_steps": "drivetrain.runtime.local_steps",
    "optimizer_kinds": "drivetrain.runtime.optimizer_kinds",
    "portable": "drivetrain.runtime.portable",
    "precision": "drivetrain.runtime.precision",
    "trees": "drivetrain.runtime.trees",
    "Recording": "drivetrain.runtime.deferred:Recording",
    "deferred": "drivetrain.runtime.deferred:deferred",
    "LocalGradients": "drivetrain.runtime.local_gradients:LocalGradients",
    "is_taken": "drivetrain.runtime.local_gradients:is_taken",
    "call_plainly": "drivetrain.runtime.model:call_plainly",
    "plain_state_dict": "drivetrain.runtime.model:plain_state_dict",
    "temporary": "drivetrain.runtime.temporary:temporary",
    "get_registry": "drivetrain.registry:get_registry",
    "pick_device": "drivetrain.runtime.device:pick_device",
    "TorchEngine": "drivetrain.runtime.engine:TorchEngine",
    "original_module": "drivetrain.runtime.placing:original_module",
    "place_model": "drivetrain.runtime.placing:place_model",
    "ProcessGroupHandle": "drivetrain.runtime.process_group:ProcessGroupHandle",
    "ensure_process_group": "drivetrain.runtime.process_group:ensure_process_group",
    "register_device_generator": "drivetrain.runtime.rng:register_device_generator",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'drivetrain.api' has no attribute {name!r}")
    module, _, attribute = _HEAVY[name].partition(":")
    value = import_module(module)
    return getattr(value, attribute) if attribute else value


__all__ = [
    "AXES",
    "CONTRACT",
    "DATA_AXES",
    "Backend",
    "BackendBlockedError",
    "BackendInfo",
    "Buffers",
    "Capabilities",
    "CheckpointError",
    "CheckpointFormat",
    "CheckpointMismatchError",
    "ConfigError",
    "DeviceGenerator",
    "DrivetrainError",
    "DummyOptim",
    "DummyScheduler",
    "Feeding",
    "FlatShard",
    "LocalGradients",
    "Mesh",
    "Place",
    "PortableState",
    "PrecisionPolicy",
    "ProcessGroupHandle",
    "ProcessGroupSettings",
    "Readiness",
    "Recording",
    "ReduceOp",
    "Rule",
    "RunSettings",
    "SavedModel",
    "Statement",
    "StepResult",
    "TensorSpec",
    "Topology",
    "TorchEngine",
    "Trainable",
    "UnsupportedError",
    "UsageError",
    "always_ready",
    "call_plainly",
    "clipping",
    "collectives",
    "deferred",
    "ensure_process_group",
    "flag",
    "foreign",
    "get_registry",
    "hookimpl",
    "is_taken",
    "load_config",
    "local_steps",
    "number",
    "optimizer_kinds",
    "original_module",
    "pick_device",
    "place_model",
    "plain_state_dict",
    "portable",
    "precision",
    "register_device_generator",
    "section_from_arguments",
    "temporary",
    "trees",
    "whole",
]
