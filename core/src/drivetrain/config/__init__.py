"""The configuration: a typed schema, filled from four layers, that records where each value was written.

Importing this package imports neither pydantic nor PyYAML; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain.config.fields import Section
    from drivetrain.config.load import load_config, worker_config
    from drivetrain.config.locate import Origin
    from drivetrain.config.resolved import ResolvedConfig, Row, rows
    from drivetrain.config.schema import Config
    from drivetrain.config.template import default_file

__getattr__ = on_first_use(
    __name__,
    {
        "drivetrain.config.fields": ("Section",),
        "drivetrain.config.load": ("load_config", "worker_config"),
        "drivetrain.config.locate": ("Origin",),
        "drivetrain.config.resolved": ("ResolvedConfig", "Row", "rows"),
        "drivetrain.config.schema": ("Config",),
        "drivetrain.config.template": ("default_file",),
    },
)

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


def __dir__() -> list[str]:
    return sorted(__all__)
