"""``drivetrain config import``: convert a configuration file of Accelerate, and report what became of each key."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drivetrain.compat.config_rules import Verdict


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", metavar="FILE", help="Write what was carried over as a configuration file of our own.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def import_file(file: str, output: str | None, force: bool) -> None:
    """Show what becomes of each key of Accelerate's FILE.

    FILE need not be imported to be used: `drivetrain launch --config_file FILE` reads it as it stands.
    """
    from drivetrain.compat.config_files import judge_file
    from drivetrain.config.locate import locate, read_file
    from drivetrain.config.resolved import mistakes
    from drivetrain.registry import get_registry

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
    """What is wrong with the values that are carried over; empty when a launch would go on."""
    from drivetrain.config import load_config
    from drivetrain.errors import DrivetrainError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keys without which the run goes on are in the report
            load_config(file, environ={})
    except DrivetrainError as error:
        return str(error)
    return ""


def report(verdicts: Iterable[Verdict]) -> Iterable[str]:
    """The three piles as lines, and whether a launch with this file would go on."""
    from drivetrain.compat.config_rules import PILES

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
    """What was carried over, as the text of a configuration file; what was not stands there as comments."""
    from drivetrain.config.locate import write

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
    from drivetrain.config.problems import show

    return f"{verdict.key}: {show(verdict.value)}"


def _right(verdict: Verdict) -> str:
    from drivetrain.config.problems import show

    if verdict.carried is None:
        return verdict.says + (" [stops the run]" if verdict.stops else "")
    return "-> " + ", ".join(f"{key}: {show(value)}" for key, value in verdict.carried.items())
