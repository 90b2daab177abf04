"""What a command line names by a path to code. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.api import UsageError


def named(where: str, what: str) -> Callable[..., Any]:
    """What a path to code names. Raises :class:`UsageError` when it is not there, or cannot be called."""
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{where!r} names no {what}", cure="Write package.module:function, or train.py:function.")
    try:
        found = vars(_module(place)).get(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        imported = "" if isinstance(error, FileNotFoundError) else str(error.name)
        here = not imported or place.startswith(imported)
        cure = "Name a module or a file." if here else f"It imports {imported!r}, which is to be installed."
        raise UsageError(f"{place!r} cannot be imported: {error}", cure=cure) from error
    if not callable(found):
        told = f"there is no {name!r} in {place!r}" if found is None else f"{name!r} in {place!r} cannot be called"
        raise UsageError(told, cure=f"Name a function that returns the {what}.")
    return found  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """Import a file, or a module that is installed or lies in this folder; a script must not train when imported."""
    if place.endswith(".py"):
        specification = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        # As `python train.py` has it: what lies beside the file can be imported, later too, by its functions.
        sys.path.insert(0, str(Path(place).resolve().parent))
        known = sys.modules.setdefault(module.__name__, module)  # data classes look their module up there
        try:
            specification.loader.exec_module(module)
        finally:
            if known is module:  # so that another file of this name is not taken for it
                del sys.modules[module.__name__]
        return module
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    finally:
        sys.path[:] = before
