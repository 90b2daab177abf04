"""``drivetrain launch``: run a script on every process of this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from drivetrain.cli.options import configuration_options, normalise, resolve


@click.command(
    # What stands after the script's name is the script's own, even where it looks like ours.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": normalise},
    epilog="Options of the launcher go before the script, those of the script after it.",
)
@configuration_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program; start it without Python in front.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print the line that says what is launched.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    config_file: str | None,
    settings: tuple[str, ...],
    module: bool,
    no_python: bool,
    quiet: bool,
    script: str,
    script_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run SCRIPT with its arguments on every process of this machine.

    One failing process stops the others; its traceback is shown once, and its exit code is the launcher's.
    """
    resolved = resolve(config_file, settings, flags)
    from drivetrain.launch import local
    from drivetrain.launch.plan import describe, make_plan

    plan = make_plan(resolved)
    if not quiet:
        click.echo(describe(plan, resolved), err=True)
    sys.exit(local.launch(resolved, [script, *script_args], module=module, no_python=no_python, plan=plan))
