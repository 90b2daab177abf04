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
from drivetrain.compat.config_rules import Rule, flag, number, section_from_arguments, whole
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
    from drivetrain.backends import elementwise as optimizer_kinds
    from drivetrain.backends import local_steps, portable
    from drivetrain.backends import torch_engine as clipping
    from drivetrain.backends.deferred_init import Recording, deferred, temporary
    from drivetrain.backends.local_gradients import LocalGradients, is_taken
    from drivetrain.backends.torch_engine import TorchEngine, TorchTrainable, original_module, place_model
    from drivetrain.checkpoint import foreign
    from drivetrain.checkpoint.flatshard import FlatShard
    from drivetrain.checkpoint.formats import CheckpointFormat
    from drivetrain.checkpoint.saved import SavedModel
    from drivetrain.config.load import load_config
    from drivetrain.distributed import collectives, trees
    from drivetrain.distributed.device import pick_device
    from drivetrain.distributed.process_group import ProcessGroupHandle, ensure_process_group
    from drivetrain.distributed.rng import DeviceGenerator, register_device_generator
    from drivetrain.loop import precision
    from drivetrain.loop.buffers import Buffers
    from drivetrain.loop.model import call_plainly, plain_state_dict
    from drivetrain.loop.placeholders import DummyOptim, DummyScheduler
    from drivetrain.registry import get_registry

_HEAVY = {
    "Buffers": "drivetrain.loop.buffers:Buffers",
    "CheckpointFormat": "drivetrain.checkpoint.formats:CheckpointFormat",
    "SavedModel": "drivetrain.checkpoint.saved:SavedModel",
    "foreign": "drivetrain.checkpoint.foreign",
    "DeviceGenerator": "drivetrain.distributed.rng:DeviceGenerator",
    "DummyOptim": "drivetrain.loop.placeholders:DummyOptim",
    "DummyScheduler": "drivetrain.loop.placeholders:DummyScheduler",
    "FlatShard": "drivetrain.checkpoint.flatshard:FlatShard",
    "load_config": "drivetrain.config.load:load_config",
    "clipping": "drivetrain.backends.torch_engine",
    "collectives": "drivetrain.distributed.collectives",
    "local_steps": "drivetrain.backends.local_steps",
    "optimizer_kinds": "drivetrain.backends.elementwise",
    "portable": "drivetrain.backends.portable",
    "precision": "drivetrain.loop.precision",
    "trees": "drivetrain.distributed.trees",
    "Recording": "drivetrain.backends.deferred_init:Recording",
    "deferred": "drivetrain.backends.deferred_init:deferred",
    "LocalGradients": "drivetrain.backends.local_gradients:LocalGradients",
    "is_taken": "drivetrain.backends.local_gradients:is_taken",
    "call_plainly": "drivetrain.loop.model:call_plainly",
    "plain_state_dict": "drivetrain.loop.model:plain_state_dict",
    "temporary": "drivetrain.backends.deferred_init:temporary",
    "get_registry": "drivetrain.registry:get_registry",
    "pick_device": "drivetrain.distributed.device:pick_device",
    "TorchEngine": "drivetrain.backends.torch_engine:TorchEngine",
    "TorchTrainable": "drivetrain.backends.torch_engine:TorchTrainable",
    "original_module": "drivetrain.backends.torch_engine:original_module",
    "place_model": "drivetrain.backends.torch_engine:place_model",
    "ProcessGroupHandle": "drivetrain.distributed.process_group:ProcessGroupHandle",
    "ensure_process_group": "drivetrain.distributed.process_group:ensure_process_group",
    "register_device_generator": "drivetrain.distributed.rng:register_device_generator",
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
    "TorchTrainable",
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
