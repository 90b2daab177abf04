"""The plugin author's one import.

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
    PortableState,
    PrecisionPolicy,
    ProcessGroupSettings,
    Readiness,
    ReduceOp,
    RunSettings,
    StepResult,
    TensorSpec,
    Trainable,
    always_ready,
)
from drivetrain.errors import (
    BackendBlockedError,
    CheckpointMismatchError,
    ConfigError,
    DrivetrainError,
    UnsupportedError,
    UsageError,
)
from drivetrain.hookspecs import hookimpl
from drivetrain.topology import AXES, DATA_AXES, Mesh, Place, Topology

if TYPE_CHECKING:
    from drivetrain.runtime import clipping, collectives, portable, precision
    from drivetrain.runtime.device import pick_device
    from drivetrain.runtime.engine import TorchEngine
    from drivetrain.runtime.placing import original_module, place_model
    from drivetrain.runtime.process_group import ProcessGroupHandle, ensure_process_group

_HEAVY = {
    "clipping": "drivetrain.runtime.clipping",
    "collectives": "drivetrain.runtime.collectives",
    "portable": "drivetrain.runtime.portable",
    "precision": "drivetrain.runtime.precision",
    "pick_device": "drivetrain.runtime.device:pick_device",
    "TorchEngine": "drivetrain.runtime.engine:TorchEngine",
    "original_module": "drivetrain.runtime.placing:original_module",
    "place_model": "drivetrain.runtime.placing:place_model",
    "ProcessGroupHandle": "drivetrain.runtime.process_group:ProcessGroupHandle",
    "ensure_process_group": "drivetrain.runtime.process_group:ensure_process_group",
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
    "Capabilities",
    "CheckpointMismatchError",
    "ConfigError",
    "DrivetrainError",
    "Mesh",
    "Place",
    "PortableState",
    "PrecisionPolicy",
    "ProcessGroupHandle",
    "ProcessGroupSettings",
    "Readiness",
    "ReduceOp",
    "RunSettings",
    "StepResult",
    "TensorSpec",
    "Topology",
    "TorchEngine",
    "Trainable",
    "UnsupportedError",
    "UsageError",
    "always_ready",
    "clipping",
    "collectives",
    "ensure_process_group",
    "hookimpl",
    "original_module",
    "pick_device",
    "place_model",
    "portable",
    "precision",
]
