"""Imports and calls what a command line names by a path to code, and reports errors of that code. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.api import DrivetrainError, UsageError


def named(where: str, what: str) -> Callable[..., Any]:
    """Import what a path to code names.

    Args:
        where: ``package.module:function`` or ``file.py:function``.
        what: it should be, for messages.

    Raises:
        UsageError: it is not there, cannot be imported, or cannot be called.
    """
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{where!r} names no {what}", cure="Write package.module:function, or train.py:function.")
    try:
        module = vars(_module(place))
    except (ModuleNotFoundError, FileNotFoundError) as error:
        imported = "" if isinstance(error, FileNotFoundError) else str(error.name)
        here = not imported or place.startswith(imported)
        cure = "Name a module or a file." if here else f"It imports {imported!r}, which is to be installed."
        raise UsageError(f"{place!r} cannot be imported: {error}", cure=cure) from error
    except DrivetrainError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{place!r} cannot be imported: {told(error)}",
            cure='Correct it; what reads arguments or trains belongs below `if __name__ == "__main__":`.',
        ) from error
    found = module.get(name)
    if found is None:
        close = get_close_matches(name, [each for each, value in module.items() if callable(value)], 1)
        guess = f"Did you mean {place}:{close[0]}?" if close else f"Name a function that returns the {what}."
        raise UsageError(f"there is no {name!r} in {place!r}", cure=guess)
    if not callable(found):
        raise UsageError(f"{name!r} in {place!r} cannot be called", cure=f"Name a function that returns the {what}.")
    return found  # type: ignore[no-any-return]


def called(function: Callable[..., Any], where: str, cure: str) -> Any:
    """Return what a function returns that is called without arguments.

    Args:
        function: of the user.
        where: its name, for messages.
        cure: what to do if it fails.

    Raises:
        UsageError: it raised something else than an error of Drivetrain.
    """
    try:
        return function()
    except DrivetrainError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where!r} failed: {told(error)}", cure=cure) from error


def told(error: BaseException) -> str:
    """Return an error's type, first line, and the last line of the user's code that it came through."""
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(first)}{first}{line}"


def _is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor of an installed package, nor of Drivetrain's own sources."""
    parts = Path(file).parts
    installed = {"site-packages", f"python{sys.version_info[0]}.{sys.version_info[1]}"} & {*parts}
    ours = any(one == "src" and two.startswith("drivetrain") for one, two in pairwise(parts))
    return not (installed or ours or file.startswith("<"))


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
