"""The command ``drivetrain check``: reads scripts without running them and says what to change."""

from __future__ import annotations

from pathlib import Path

import click

from drivetrain.api import UsageError


@click.command(short_help="Read a script without running it; say what to change.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(files: tuple[Path, ...]) -> None:
    """Read scripts without running them, and list the lines to change.

    Each line is one of these: it raises here, it gives other numbers than under Accelerate or plain torch, or it
    can go. A script that trains by torch alone, by Lightning's Fabric or by a Trainer is told how it comes here.
    Only what the text of a file shows is found. The exit status is 1 where something raises or differs.
    """
    from drivetrain_convert.script_check import Kind, check_script

    worst = 0
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{file} cannot be read as text: {error}", cure="Give a Python script.") from error
        found = check_script(source, str(file))
        for each in found:
            click.echo(f"{file}:{each.line}: {each.kind}: {each.text}. {each.instead}")
        changes = sum(each.kind is not Kind.LEAVE_OUT for each in found)
        rest = len(found) - changes
        click.echo(f"{file}: {_counted(changes, 'line')} to change, {_counted(rest, 'line')} that can go.")
        worst = max(worst, int(changes > 0))
    raise SystemExit(worst)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
