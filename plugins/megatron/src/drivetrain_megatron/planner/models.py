"""What the command line names by a path to code: a function that returns a model, or the arguments of its forward."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drivetrain.api import UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def build(where: str) -> nn.Module:
    """Make a model without its memory.

    Args:
        where: ``package.module:function`` or ``file.py:function``; a class without arguments is a function, too.

    Raises:
        UsageError: there is no such thing, or it does not return a module.
    """
    function = _named(where, "model")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{where!r} returned a {type(model).__name__}, not a model", cure="Name a function that returns a module."
        )
    return model


def batch(where: str) -> Arguments:
    """The arguments of a forward: a dict is given by name, a tuple or list in its order, anything else alone.

    Raises:
        UsageError: there is no such function.
    """
    found = _named(where, "batch")()
    if isinstance(found, Mapping):
        return (), dict(found)
    return (tuple(found) if isinstance(found, (tuple, list)) else (found,)), {}


def _named(where: str, what: str) -> Callable[[], Any]:
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{where!r} names no {what}", cure="Write package.module:function, or train.py:function.")
    try:
        found = vars(_module(place)).get(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UsageError(f"{place!r} cannot be imported: {error}", cure="Name a module or a file.") from error
    if found is None:
        raise UsageError(f"there is no {name!r} in {place!r}", cure=f"Name a function that returns the {what}.")
    if not callable(found):
        raise UsageError(f"{name!r} in {place!r} is of type {type(found).__name__}", cure="Name a function or a class.")
    return found  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """Import a file, or a module that is installed or lies in this folder, as a script's own neighbours do."""
    if place.endswith(".py"):
        specification = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    finally:
        sys.path[:] = before
