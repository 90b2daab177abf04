"""Registers the distribution's subcommands. Imports no torch."""

from __future__ import annotations

import click

from drivetrain.api import hookimpl


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """Add ``drivetrain check``."""
    from drivetrain_convert.check import check

    group.add_command(check)
