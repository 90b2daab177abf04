"""``drivetrain plan choose``, ``memory`` and ``measure``. Torch and PyYAML are imported when one of them runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.api import UsageError
from drivetrain.api.programs import pip_line

if TYPE_CHECKING:
    from drivetrain_planner.choosing import Candidate, Choice


def _dashes(name: str) -> str:
    """``--global-batch`` is ``--global_batch``."""
    return name.replace("-", "_")


ELSEWHERE = {"schedule": "megatron", "show": "megatron"}
"""Subcommands of the group that another distribution adds: the extra that brings it."""


class Plans(click.Group):
    """A group that says what to install for a subcommand that is not there."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in ELSEWHERE and args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(f"The subcommand 'plan {args[0]}' is not installed. Run: {pip_line(ELSEWHERE[args[0]])}")
        return super().resolve_command(ctx, args)


@click.group(cls=Plans, context_settings={"token_normalize_func": _dashes})
def plan() -> None:
    """Look at layouts, memory and schedules before anything runs."""


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what `choose` and `memory` are asked with."""
    for add in reversed(
        (
            click.argument("model"),
            click.option("--batch", metavar="PATH", help="A function, named like MODEL, that returns a micro-batch."),
            click.option("--loss", metavar="PATH", help="A function of output and batch; the output's own loss."),
            click.option("--processes", type=click.IntRange(1), metavar="N", help="Over all machines; one machine's."),
            click.option("--nodes", type=click.IntRange(1), metavar="N", help="Machines, all filled; for --processes."),
            click.option("--machine", metavar="NAME", help="Name or YAML file; the measured one, else h100x8."),
            click.option("--memory", metavar="SIZE", help="Of one device, such as 24GiB; the machine's."),
            click.option("--global_batch", type=click.IntRange(1), metavar="N", help="Samples of an optimizer step."),
            click.option("--mixed_precision", type=click.Choice(["no", "bf16", "fp16"]), help="The configuration's."),
            click.option("--optimizer", default="AdamW", show_default=True, metavar="NAME", help="Of torch.optim."),
            click.option("--optimizer_args", default="{}", metavar="YAML", help="Such as '{momentum: 0.9}'."),
            click.option("--samples", type=click.IntRange(1), metavar="N", help="Of a Transformers micro-batch; 1."),
            click.option("--length", type=click.IntRange(1), metavar="N", help="Of its sequences; 1024."),
            click.option("--config", "config_file", metavar="FILE", help="Keep to what this file says of backends."),
            click.option(
                "--plot",
                metavar="FILE",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Draw what a rank holds by part: .png, .svg.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Everything, for programs."),
        )
    ):
        command = add(command)
    return command


@plan.command()
@options
@click.option("--explain", is_flag=True, help="Show memory and time of the chosen and the next by part.")
@click.option("--write", metavar="FILE", type=click.Path(path_type=Path), help="Write a configuration that trains so.")
def choose(as_json: bool, explain: bool, write: Path | None, plot: Path | None, **flags: Any) -> None:
    """Choose a backend and its settings for a model on some machines.

    MODEL is package.module:function or file.py:function, or a config.json of Transformers or its name on the hub. It is
    made without memory, one micro-batch is traced, and every installed backend is asked what its layouts would hold and
    cost.
    """
    import yaml

    from drivetrain_planner.choosing import settings_of
    from drivetrain_planner.report import RUNNERS_UP, data, lines

    for path in (write, plot):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} for {path.name}", cure="Make it, or name another.")
    if write is not None and write.exists():
        raise UsageError(f"{write} is there already", cure="Name another file, or remove it.")
    found = _plan(flags)
    click.echo(json.dumps(data(found), indent=2) if as_json else "\n".join(lines(found, explain=explain)))
    if plot is not None:
        # Where none fits, all: the picture shows by how much.
        _draw(found.fitting[: RUNNERS_UP + 1] or found.rejected, found, plot)
    best = found.best
    if write is not None:
        settings = {**settings_of(best, found.request), "plan": _plan_keys(flags)}
        write.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        click.echo(f"Wrote {write}. Train with it: drivetrain launch --config {write} script.py", err=True)


@plan.command()
@options
def memory(as_json: bool, plot: Path | None, **flags: Any) -> None:
    """Print what a rank would hold under each layout, one a line. MODEL as for choose."""
    from drivetrain_planner.report import by_rank, data, memory_lines

    found = _plan(flags)
    click.echo(json.dumps(data(found), indent=2) if as_json else "\n".join(memory_lines(found)))
    if plot is not None:
        _draw(by_rank(found), found, plot)


@plan.command()
@click.option("--processes", type=click.IntRange(1), metavar="N", help="All accelerators; 2 where there is none.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.3, show_default=True, help="Each number.")
@click.option("--cpu", is_flag=True, help="Leave accelerators aside.")
@click.option("--write", metavar="FILE", type=click.Path(path_type=Path), help="Keep it here, and not for `here`.")
def measure(processes: int | None, seconds: float, cpu: bool, write: Path | None) -> None:
    """Measure this machine once: memory, arithmetic, memory bandwidth, links.

    What is measured is kept for `--machine here`, which the other commands take where no machine is named. The link to
    other machines is not measured.
    """
    import yaml

    from drivetrain_planner.machines import SUFFIXES, kept_file
    from drivetrain_planner.measuring import as_file
    from drivetrain_planner.measuring import measure as measured

    path = kept_file() if write is None else write
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a machine's file is YAML", cure=f"Name it {path.with_suffix('.yaml')}.")
    if write is not None and write.exists():
        raise UsageError(f"{write} is there already", cure="Name another file, or remove it.")
    found = as_file(measured(processes, seconds, "cpu" if cpu else None))
    text = yaml.safe_dump(found, sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    named = "here" if write is None else str(path)
    click.echo(text, nl=False)
    click.echo(f"Wrote {path}. Plan with it: --machine {named}", err=True)


def _draw(layouts: Sequence[Candidate], found: Choice, path: Path) -> None:
    from drivetrain_planner.picture import write

    write(layouts, found, path)
    click.echo(f"Wrote {path}", err=True)


def _plan_keys(flags: dict[str, Any]) -> dict[str, Any]:
    """The section `plan:` that says what was asked, so that a launch with the written file can be checked."""
    import yaml

    keys = ("model", "batch", "loss", "machine", "memory", "optimizer", "optimizer_args", "samples", "length")
    said = {key: flags[key] for key in keys if flags[key] is not None}
    arguments = yaml.safe_load(said["optimizer_args"])
    return {**said, "optimizer_args": arguments}


def _plan(flags: dict[str, Any]) -> Choice:
    import yaml

    from drivetrain.api.programs import load_config
    from drivetrain_planner.choosing import check_mesh
    from drivetrain_planner.choosing import choose as choose_layout
    from drivetrain_planner.machines import HERE, find, kept_file
    from drivetrain_planner.requests import Asked, request

    resolved = load_config(flags["config_file"]) if flags["config_file"] is not None else None
    if resolved is not None:
        check_mesh(resolved.config.mesh.sizes())
    try:
        arguments = yaml.safe_load(flags["optimizer_args"])
    except yaml.YAMLError:
        arguments = None
    if not isinstance(arguments, dict):
        told = f"--optimizer_args {flags['optimizer_args']!r} are no keys and values"
        raise UsageError(told, cure="Write them as '{lr: 0.1, momentum: 0.9}'.")
    if flags["batch"] is not None and (said := [key for key in ("samples", "length") if flags[key] is not None]):
        raise UsageError(
            f"--{said[0]} is of the batch that is made for a Transformers configuration, and --batch returns one",
            cure=f"Leave out --{said[0]}, or --batch.",
        )
    processes, nodes = flags["processes"], flags["nodes"]
    if processes is not None and nodes is not None:
        raise UsageError("--nodes and --processes both say how many processes there are", cure="Leave one of them out.")
    name = flags["machine"] or (HERE if kept_file().exists() else "h100x8")
    if flags["machine"] is None and name != HERE:
        told = f"No machine is named, and none was measured: this is planned for {name}."
        click.echo(f"{told} Name yours by --machine, or run drivetrain plan measure there.", err=True)
    machine = find(name, processes if name == "cpu" else None, flags["memory"])
    if nodes is not None:
        processes = nodes * machine.devices
    asked = Asked(
        model=flags["model"],
        batch=flags["batch"],
        loss=flags["loss"],
        processes=processes or machine.devices,
        global_batch=flags["global_batch"],
        mixed_precision=flags["mixed_precision"] or ("no" if resolved is None else resolved.config.mixed_precision),
        optimizer=flags["optimizer"],
        optimizer_args=arguments,
        samples=flags["samples"] or 1,
        length=flags["length"] or 1024,
        sections={} if resolved is None else resolved.sections,
    )
    return choose_layout(request(asked, machine), machine)
