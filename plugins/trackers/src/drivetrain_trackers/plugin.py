"""Names the trackers whose library is installed, and adds ``drivetrain plot``. Imports no library, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from drivetrain.api import hookimpl

if TYPE_CHECKING:
    import click

TRACKERS = {
    "mlflow": "drivetrain_trackers.mlflow:MLflowTracker",
    "tensorboard": "drivetrain_trackers.tensorboard:TensorBoardTracker",
    "trackio": "drivetrain_trackers.runs:TrackioTracker",
    "wandb": "drivetrain_trackers.runs:WandBTracker",
}
"""Trackers by the name of their library, which is also the extra that installs it."""


@hookimpl
def drivetrain_trackers() -> Mapping[str, str]:
    """Those that can run here: of another the core says which command installs it."""
    return {name: target for name, target in TRACKERS.items() if _is_installed(name)}


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """``drivetrain plot``."""
    from drivetrain_trackers.commands import plot

    group.add_command(plot)


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # A folder without code, such as the one `wandb` writes its runs to, is a namespace package and has no origin.
    return spec is not None and spec.origin is not None
