"""``drivetrain``: the group of all subcommands, which it imports only when they are called."""

from __future__ import annotations

import io
import signal
import sys
import warnings
from importlib import import_module
from typing import Any

import click

from drivetrain.errors import DrivetrainError
from drivetrain.wording import did_you_mean, sentences

COMMANDS = {
    "backends": (
        "drivetrain.cli.backends:backends",
        "List the backends: whose they are, what they can do; ready, not ready, or not installed.",
    ),
    "checkpoint": (
        "drivetrain.cli.checkpoint:checkpoint",
        "Look into a checkpoint, export its model, convert what other libraries wrote.",
    ),
    "compare": (
        "drivetrain.cli.compare:compare",
        "Run a script on one process and as configured; say where they differ.",
    ),
    "config": ("drivetrain.cli.config:config", "Write a configuration file, or show where each value comes from."),
    "env": ("drivetrain.cli.env:env", "Print versions, devices and plugins for a bug report."),
    "launch": ("drivetrain.cli.launch:launch", "Run a script on every process of this machine."),
    "test": ("drivetrain.cli.test:test", "Run a short distributed job and check its numbers."),
}
"""The core's subcommands: where each is, and its line in the help."""

ELSEWHERE = {
    "check": ("convert", "Read a script without running it; say what to change."),
    "new-plugin": ("testing", "Write a package that brings a backend of your own."),
    "plan": ("planner", "Choose a backend and its settings for a model; show memory, layouts, schedules."),
    "plot": ("plot", "Draw what runs logged, side by side: losses, metrics, rates, steps per second."),
}
"""Subcommands that come with another distribution of ours: its extra, and their line in the help without it."""


class Commands(click.Group):
    """A group that imports a subcommand when it is needed; plugins may add more."""

    _asked = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._ask_plugins()
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        self._ask_plugins()
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            if name in ELSEWHERE:
                from drivetrain.registry import pip_line

                ctx.fail(f"The subcommand {name!r} is not installed. Run: {pip_line(ELSEWHERE[name][0])}")
            guess = did_you_mean(name, known) or f"There are: {', '.join(known)}."
            ctx.fail(sentences(f"There is no subcommand {name!r}.", guess))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            line = COMMANDS[name][1] if name in COMMANDS else self.commands[name].get_short_help_str(limit=100)
            rows.append((name, line))
        missing = [name for name in ELSEWHERE if name not in self.commands]
        if missing:
            from drivetrain.registry import pip_line

            rows += [(name, f"{ELSEWHERE[name][1]} Needs: {pip_line(ELSEWHERE[name][0])}") for name in missing]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C ends every subcommand with the code that a shell gives it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("stopped by SIGINT", err=True)
            ctx.exit(128 + signal.SIGINT)

    def _ask_plugins(self) -> None:
        """Add the plugins' subcommands, once; an error in one is reported and does not affect the others."""
        if self._asked:
            return
        self._asked = True
        from drivetrain.registry import get_registry

        scratch = click.Group("drivetrain", commands=dict.fromkeys(COMMANDS, click.Command("taken")))
        for complaint in get_registry().add_commands(scratch):
            click.echo(f"warning: {complaint}", err=True)
        self.commands.update({name: command for name, command in scratch.commands.items() if name not in COMMANDS})


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from drivetrain.registry import core_version

        click.echo(f"drivetrain {core_version()}")
        ctx.exit()


EPILOG = """\b
To begin:
  drivetrain test --cpu --num_processes 2
  drivetrain launch --cpu --num_processes 2 train.py
  drivetrain COMMAND --help
"""


@click.group(
    cls=Commands,
    name="drivetrain",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=EPILOG,
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Print it.")
def drivetrain() -> None:
    """One PyTorch training loop, any distributed backend."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: with 0, with 2 for a usage error, else with the failure's own code."""
    warnings.formatwarning = _plain_warning
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: text of a plugin or a path may be invalid UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        drivetrain.main(args=arguments, prog_name="drivetrain")
    except DrivetrainError as error:
        click.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)


def _plain_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Show only the message: our source lines mean nothing to a user of the command line."""
    return f"warning: {message}\n"
