"""The configuration: a typed schema, filled from four layers, that records where each value was written.

Importing this package imports neither pydantic nor PyYAML; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.config.load import load_config, worker_config
    from drivetrain.config.locate import Origin
    from drivetrain.config.resolved import ResolvedConfig, Row, rows
    from drivetrain.config.schema import Config, Section
    from drivetrain.config.template import default_file

_HOME = {
    "Config": "schema",
    "Origin": "locate",
    "ResolvedConfig": "resolved",
    "Row": "resolved",
    "Section": "schema",
    "default_file": "template",
    "load_config": "load",
    "rows": "resolved",
    "worker_config": "load",
}

__all__ = [
    "Config",
    "Origin",
    "ResolvedConfig",
    "Row",
    "Section",
    "default_file",
    "load_config",
    "rows",
    "worker_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
