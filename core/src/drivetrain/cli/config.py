"""``drivetrain config``: write a configuration file, take over Accelerate's, or show where each value comes from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from drivetrain.cli.imported import import_file
from drivetrain.cli.options import configuration_options, normalise, resolve

DEFAULT_FILE = "drivetrain.yaml"


@click.group(invoke_without_command=True, context_settings={"token_normalize_func": normalise})
@click.option("--default", is_flag=True, help="Ask nothing; write every key with its default.")
@click.option(
    "--config",
    "--config_file",
    "-o",
    "target",
    default=DEFAULT_FILE,
    show_default=True,
    metavar="FILE",
    help="To write.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.pass_context
def config(ctx: click.Context, default: bool, target: str, force: bool) -> None:
    """Ask a few questions and write a commented configuration file.

    Asks with menus on a terminal and line by line elsewhere, and only what the machine does not tell; where nobody
    answers, defaults are written. The file is shown before it is written; Ctrl-C leaves nothing behind.
    """
    if ctx.invoked_subcommand is not None:
        return
    path = Path(target)
    if path.exists() and not force:
        raise click.UsageError(f"{target} exists already; --force replaces it, --config FILE writes elsewhere")
    from drivetrain.config import default_file

    text = default_file() if default else _asked(target)
    if text is None:
        click.echo("Nothing was written.")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(f"Wrote {target}. Use it: drivetrain launch --config {target} script.py")


def _asked(target: str) -> str | None:
    """The text of a file from answers, ``None`` when it shall not be written."""
    from drivetrain.cli.detected import detect
    from drivetrain.cli.prompts import Lines, Terminal
    from drivetrain.cli.wizard import Wizard
    from drivetrain.config.template import chosen_file
    from drivetrain.registry import get_registry

    machine = detect()
    click.echo(f"Found: {machine}.")
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    wizard = Wizard(Terminal() if on_terminal else Lines(sys.stdin), machine, get_registry())
    values = wizard.run()
    remarks = [f"Found when it was written: {machine}."]
    if values.get("num_machines", 1) > 1:
        remarks.append("The same file serves every machine; `drivetrain launch --machine_rank 0` says which one it is.")
    text = chosen_file(values, get_registry(), remarks)
    click.echo(f"\n{text}")
    return text if wizard.confirm(f"Write this to {target}?") else None


@config.command()
@configuration_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(config_file: str | None, settings: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Print each value of the configuration and where it came from."""
    from drivetrain.config import rows

    found = rows(resolve(config_file, settings, flags))
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in found], indent=2))
        return
    texts = [(row.key, json.dumps(row.value, default=str), str(row.origin)) for row in found]
    widths = [max(len(text[column]) for text in texts) for column in (0, 1)]
    for key, value, origin in texts:
        click.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


config.add_command(import_file)
