"""Converts checkpoints of other libraries to Drivetrain's, and back where a plugin can write.

Names are imported when they are used, so that the command line and a plugin that names a format import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_convert.foreign import ForeignCheckpoint, Source, load_pickle
    from drivetrain_convert.formats import CheckpointFormat
    from drivetrain_convert.reading import Converted, convert
    from drivetrain_convert.writing import SavedModel, convert_to

_MODULES = {
    "CheckpointFormat": "formats",
    "Converted": "reading",
    "ForeignCheckpoint": "foreign",
    "SavedModel": "writing",
    "Source": "foreign",
    "convert": "reading",
    "convert_to": "writing",
    "load_pickle": "foreign",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "CheckpointFormat",
    "Converted",
    "ForeignCheckpoint",
    "SavedModel",
    "Source",
    "convert",
    "convert_to",
    "load_pickle",
]
