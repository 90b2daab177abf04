"""What the planner adds to Drivetrain, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.api import hookimpl

if TYPE_CHECKING:
    import click

    from drivetrain.api import ResolvedConfig


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """``drivetrain plan choose``, ``memory`` and ``measure``."""
    from drivetrain_planner.commands import plan

    group.add_command(plan)


@hookimpl
def drivetrain_choose(resolved: ResolvedConfig) -> Mapping[str, Any] | None:
    """What ``distributed_type: auto`` stands for."""
    from drivetrain_planner.auto import chosen

    return chosen(resolved)
