"""Imports the public names of a package on first use, so that importing the package imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported on first use, and list them in its ``dir()``.

    Args:
        package: its ``__name__``, for the message about a name that it does not have.
        homes: public names by the module that has them, or of which they are submodules.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(home_of[name])
        return getattr(home, name) if hasattr(home, name) else import_module(f"{home_of[name]}.{name}")

    module = sys.modules[package]
    module.__dir__ = lambda: sorted({*vars(module), *home_of})  # type: ignore[method-assign]
    return find
