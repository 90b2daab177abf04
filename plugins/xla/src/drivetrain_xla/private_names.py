"""Private names of torch_xla that this backend reads, checked when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from drivetrain.api import BackendBlockedError

TESTED = "2.9.0"
"""The release that ``locks/xla.txt`` holds."""


def check() -> None:
    """Raise where the installed torch_xla lacks a name. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    for owner, names in _wanted():
        BackendBlockedError.check_names(owner, names, library="torch_xla", tested=TESTED, user="drivetrain-xla")


def _wanted() -> Iterator[tuple[object, tuple[str, ...]]]:
    torch_xla = import_module("torch_xla")
    yield torch_xla, ("_XLAC",)
    yield torch_xla._XLAC, ("_xla_computation_cache_is_initialized",)  # noqa: SLF001
    yield import_module("torch_xla.core.xla_model"), ("_maybe_convert_to_cpu",)
