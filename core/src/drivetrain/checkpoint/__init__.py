"""Checkpoints that belong to the training run, not to the backend that wrote them.

A checkpoint is a folder: ``manifest.json`` and tensors as safetensors under the names of the original module. Nothing
in it is ever unpickled. The names below are imported when they are used: the manifest can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.checkpoint.background import BackgroundSaver
    from drivetrain.checkpoint.converting import Converted, convert
    from drivetrain.checkpoint.export import export_checkpoint, export_model, save_object
    from drivetrain.checkpoint.folder import Naming
    from drivetrain.checkpoint.formats import CheckpointFormat, convert_to
    from drivetrain.checkpoint.inspection import Inspection, inspect
    from drivetrain.checkpoint.loader import load
    from drivetrain.checkpoint.manifest import Manifest, read_manifest
    from drivetrain.checkpoint.saver import save
    from drivetrain.checkpoint.state import Rng, TrainingState

_HOMES = {
    "BackgroundSaver": "background",
    "CheckpointFormat": "formats",
    "Converted": "converting",
    "Inspection": "inspection",
    "Manifest": "manifest",
    "Naming": "folder",
    "Rng": "state",
    "TrainingState": "state",
    "convert": "converting",
    "convert_to": "formats",
    "export_checkpoint": "export",
    "export_model": "export",
    "inspect": "inspection",
    "load": "loader",
    "read_manifest": "manifest",
    "save": "saver",
    "save_object": "export",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


__all__ = [
    "BackgroundSaver",
    "CheckpointFormat",
    "Converted",
    "Inspection",
    "Manifest",
    "Naming",
    "Rng",
    "TrainingState",
    "convert",
    "convert_to",
    "export_checkpoint",
    "export_model",
    "inspect",
    "load",
    "read_manifest",
    "save",
    "save_object",
]
