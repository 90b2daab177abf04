"""``drivetrain config``: writes a configuration file, imports Accelerate's, or shows where each value comes from."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from drivetrain.cli.options import DEFAULT_FILE, chosen_file, configuration_options, normalise, resolve, users_file
from drivetrain.config import default_file, load_config, rows
from drivetrain.config.accelerate_file import judge_file
from drivetrain.config.accelerate_rules import PILES, Verdict
from drivetrain.config.locate import locate, read_file, write
from drivetrain.config.problems import show as shown
from drivetrain.config.resolved import mistakes
from drivetrain.errors import DrivetrainError
from drivetrain.registry import get_registry


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
@click.option("--user", is_flag=True, help="Write the file of all your runs that name none, instead of FILE.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.pass_context
def config(ctx: click.Context, default: bool, target: str, user: bool, force: bool) -> None:
    """Ask a few questions and write a commented configuration file.

    Asks with menus on a terminal and line by line elsewhere, and only what the machine does not tell; where nobody
    answers, defaults are written. The file is shown before it is written; Ctrl-C leaves nothing behind.
    """
    if ctx.invoked_subcommand is not None:
        return
    if user:
        target = str(users_file())
    path = Path(target)
    if path.exists() and not force:
        raise click.UsageError(f"{target} exists already; --force replaces it, --config FILE writes elsewhere")
    text = default_file() if default else _asked(target)
    if text is None:
        click.echo("Nothing was written.")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    found = user or target == DEFAULT_FILE
    use = "drivetrain launch script.py" if found else f"drivetrain launch --config {target} script.py"
    click.echo(f"Wrote {target}. Use it: {use}")


def _asked(target: str) -> str | None:
    """Return the text of a file from answers; ``None`` if the user declines to write it."""
    from drivetrain.cli.prompts import Lines, Terminal
    from drivetrain.cli.wizard import Wizard, detect
    from drivetrain.config.template import chosen_file

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
    config_file, remark = chosen_file(config_file)
    if remark:
        click.echo(remark, err=True)
    found = rows(resolve(config_file, settings, flags))
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in found], indent=2))
        return
    texts = [(row.key, json.dumps(row.value, default=str), str(row.origin)) for row in found]
    widths = [max(len(text[column]) for text in texts) for column in (0, 1)]
    for key, value, origin in texts:
        click.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


@config.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", metavar="FILE", help="Write what was carried over as a configuration file of our own.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def import_file(file: str, output: str | None, force: bool) -> None:
    """Show what becomes of each key of Accelerate's FILE.

    FILE need not be imported to be used: `drivetrain launch --config_file FILE` reads it as it stands.
    """
    target = None if output is None else Path(output)
    if target is not None and target.exists() and not force:
        raise click.UsageError(f"{output} exists already; --force replaces it")
    document = locate(read_file(file), file)
    if document.problems:
        raise mistakes(document.problems)
    verdicts = judge_file(document.values, get_registry())
    for line in report(verdicts):
        click.echo(line)
    if not any(verdict.stops for verdict in verdicts) and (wrong := _what_stops(file)):
        click.echo(f"`drivetrain launch` stops with this file: {wrong}")
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(as_file(verdicts, file), encoding="utf-8")
        click.echo(f"Wrote {output}. Use it: drivetrain launch --config {output} script.py")


def _what_stops(file: str) -> str:
    """Problems of the values that are carried over; empty when a launch would go on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keys without which the run goes on are in the report
            load_config(file, environ={})
    except DrivetrainError as error:
        return str(error)
    return ""


def report(verdicts: Iterable[Verdict]) -> Iterable[str]:
    """The report as lines, and whether a launch with this file would go on."""
    verdicts = list(verdicts)
    for pile in PILES:
        here = [verdict for verdict in verdicts if verdict.pile == pile]
        yield f"{pile.capitalize()} ({len(here)})"
        width = max((len(_left(verdict)) for verdict in here), default=0)
        for verdict in here:
            yield f"  {_left(verdict):<{width}}  {_right(verdict)}"
    stopping = [verdict.key for verdict in verdicts if verdict.stops]
    if stopping:
        yield f"`drivetrain launch` stops with this file: without {', '.join(stopping)} the results would be others."


def as_file(verdicts: Iterable[Verdict], source: str) -> str:
    """Return the converted keys as the text of a configuration file, with the others as comments."""
    lines = [f"# From {source}, a configuration file of Accelerate."]
    tree: dict[str, Any] = {}
    for verdict in verdicts:
        for key, value in (verdict.carried or {}).items():
            *above, last = key.split(".")
            here = tree
            for part in above:
                here = here.setdefault(part, {})
            here[last] = value
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{key}:", *(f"  {inner}: {write(each)}" for inner, each in value.items())]
        else:
            lines.append(f"{key}: {write(value)}")
    lost = [verdict for verdict in verdicts if verdict.pile == "not supported"]
    lines += [f"# not carried over: {_left(verdict)} ({verdict.says})" for verdict in lost]
    return "\n".join(lines) + "\n"


def _left(verdict: Verdict) -> str:
    return f"{verdict.key}: {shown(verdict.value)}"


def _right(verdict: Verdict) -> str:
    if verdict.carried is None:
        return verdict.says + (" [stops the run]" if verdict.stops else "")
    return "-> " + ", ".join(f"{key}: {shown(value)}" for key, value in verdict.carried.items())
