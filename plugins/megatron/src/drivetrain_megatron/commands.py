"""``drivetrain plan``: pipelines looked at before anything runs. Torch is imported when a subcommand needs it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.api import UsageError

if TYPE_CHECKING:
    from drivetrain_megatron.config import MegatronConfig
    from drivetrain_megatron.planner.planning import Request
    from drivetrain_megatron.planner.report import Plan
    from drivetrain_megatron.planner.search import Found
    from drivetrain_megatron.planner.simulate import Bar

COSTS = {
    "forward": ("T[,T..]", "Time of a forward of one micro-batch, by stage or by rank; 1."),
    "backward": ("T[,T..]", "Time of a whole backward; twice the forward."),
    "weight_share": ("X", "Part of a backward that is for the weights; 0.5."),
    "split": ("X", "How many times as long its two parts take, run apart, as a backward in one piece; 1."),
    "transfer": ("T", "Time until another rank has a result; 0."),
    "gap": ("T", "Least time between two actions of a rank; 0."),
    "overhead": ("T", "Part of each time that does not shrink with the micro-batch; 0."),
    "activations": ("SIZE[,SIZE..]", "Memory that one forward leaves behind, by stage or by rank."),
    "kept_for_weights": ("X", "Part of it that is still there between the two parts of a backward; 1."),
    "resident": ("SIZE[,SIZE..]", "Memory of parameters, gradients and optimizer state, likewise."),
}
"""Flags that set costs; a file given with --costs replaces all of them."""

SEARCH_ONLY = ("memory", "samples", "counts")

PAINTS = {"F": ("black", "bright_blue"), "B": ("black", "green"), "I": ("black", "yellow"), "W": ("black", "magenta")}
"""Colours of letters and ground on a terminal, by kind of action."""


def _dashes(name: str) -> str:
    """``--micro-batches`` is ``--micro_batches``."""
    return name.replace("-", "_")


def cost_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--costs`` and every flag of :data:`COSTS`."""
    for name, (metavar, text) in reversed(COSTS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    return click.option(
        "--costs", "costs_file", type=click.Path(path_type=Path), metavar="FILE", help="Measured costs, as JSON."
    )(command)


@click.group(context_settings={"token_normalize_func": _dashes})
def plan() -> None:
    """Look at pipeline schedules and tensor-parallel layouts before anything runs."""


@plan.command()
@click.argument("model")
@click.option("--config", "config_file", metavar="FILE", help="Take degrees, engine and plan from this file.")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Ranks that share each matrix; the configuration's.")
@click.option("--pp", type=click.IntRange(1), metavar="N", help="Ranks that share the depth; the configuration's.")
@click.option("--engine", type=click.Choice(["torch", "megatron_core"]), help="What computes; the configuration's.")
@click.option("--batch", metavar="PATH", help="A function, named like MODEL, that returns the arguments of a forward.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def show(
    model: str,
    config_file: str | None,
    tp: int | None,
    pp: int | None,
    engine: str | None,
    batch: str | None,
    as_json: bool,
) -> None:
    """Print what each rank of a model would hold: its stages of the pipeline, and its part of each parameter.

    MODEL is package.module:function or file.py:function; the model that it returns is made without memory. A pipeline
    is cut by following one forward; its inputs are guessed from the model, or are those of --batch.
    """
    from drivetrain_megatron.planner.models import batch as batch_of
    from drivetrain_megatron.planner.models import build

    section, mesh = _section(config_file)
    degree = tp or section.tensor_parallel_size or mesh.get("tp", 1)
    pipeline_ranks = pp or section.pipeline_parallel_size or mesh.get("pp", 1)
    if (engine or section.engine) == "megatron_core":
        from drivetrain_megatron.planner import core_layout

        found = core_layout.layout_of(build(model), degree, pipeline_ranks, section)
    else:
        from drivetrain_megatron.planner import torch_layout

        arguments = None if batch is None else batch_of(batch)
        found = torch_layout.layout_of(build(model), degree, pipeline_ranks, section, arguments)
    click.echo(json.dumps(found.data(), indent=2) if as_json else "\n".join(found.lines()))


@plan.command()
@click.option("--config", "config_file", metavar="FILE", help="Take ranks, micro-batches and schedule from this file.")
@click.option("--schedule", "schedules", multiple=True, metavar="NAME", help="Which; 1f1b. For --search several times.")
@click.option("--ranks", type=click.IntRange(1), metavar="P", help="Ranks of the pipeline; 4.")
@click.option("--micro_batches", type=click.IntRange(1), metavar="M", help="Of one step; the costs are of one; 2P.")
@click.option("--stages_per_rank", type=click.IntRange(1), metavar="V", help="For --search the most that it tries; 2.")
@cost_options
@click.option("--unit", metavar="NAME", help="Of time, for axes and tables, such as ms.")
@click.option("--search", "searching", is_flag=True, help="Try schedules and micro-batch counts for the shortest step.")
@click.option("--memory", metavar="SIZE", help="What a rank may use; for --search.")
@click.option("--samples", type=click.IntRange(1), metavar="N", help="Of a step; --search tries their divisors.")
@click.option("--counts", metavar="M[,M..]", help="Micro-batch counts that --search tries.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture: .png or .svg.")
@click.option("--width", type=click.IntRange(20), metavar="N", help="Columns of the drawing; the terminal's.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def schedule(**flags: Any) -> None:
    """Simulate a pipeline schedule from torch's own list of actions, and draw it.

    Rows are ranks, columns are time; beside the simulated bubble stands the theoretical one. With nothing given, a
    forward takes 1 and a backward 2.
    """
    if flags["config_file"] is not None:
        flags = _configured(flags["config_file"], flags)
    request = _request(flags)
    drawn, found = _search(request, flags) if flags["searching"] else (_simulate(request, flags), None)
    if flags["output"] is not None:
        from drivetrain_megatron.planner import picture

        picture.write(drawn.timeline, flags["output"], title=drawn.title(), unit=drawn.unit)
    click.echo(_json(drawn, found) if flags["as_json"] else _text(drawn, found, flags["width"]))


def _section(config_file: str | None) -> tuple[MegatronConfig, dict[str, int]]:
    """Return the section ``megatron:`` of a configuration and the axes of its mesh; without a file, the defaults."""
    from drivetrain.api.programs import load_config
    from drivetrain_megatron.config import MegatronConfig

    if config_file is None:
        return MegatronConfig(), {}
    resolved = load_config(config_file)
    return resolved.validated_section(MegatronConfig, "megatron"), resolved.config.mesh.sizes()


def _configured(config_file: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags, those that were not given filled up from the section ``megatron:`` of a configuration."""
    from drivetrain_megatron.planner.catalogue import find

    section, mesh = _section(config_file)
    ranks = flags["ranks"] or section.pipeline_parallel_size or mesh.get("pp", 1)
    if flags["searching"]:
        # A search restricted to the file's schedule would not compare the others.
        return flags | {"ranks": ranks, "micro_batches": flags["micro_batches"] or section.num_micro_batches}
    schedules = flags["schedules"] or (section.schedule,)
    stages = flags["stages_per_rank"] or find(schedules[0]).stages_per_rank or section.stages_per_rank
    count = flags["micro_batches"] or section.num_micro_batches or ranks * stages
    return flags | {"ranks": ranks, "micro_batches": count, "schedules": schedules, "stages_per_rank": stages}


def _request(flags: dict[str, Any]) -> Request:
    """Return what is to be planned."""
    from drivetrain_megatron.planner import inputs
    from drivetrain_megatron.planner.planning import Request

    given = {name: flags[name] for name in COSTS if flags[name] is not None}
    if flags["costs_file"] is not None and given:
        raise UsageError(f"--costs and --{next(iter(given))} say the same thing twice", cure="Leave one of them out.")
    measured = inputs.read_costs(flags["costs_file"]) if flags["costs_file"] is not None else inputs.costs_from(given)
    costs = measured.costs()
    ranks = flags["ranks"] or (costs.num_stages if costs.num_stages > 1 else 4)
    count = flags["micro_batches"] or measured.num_micro_batches or 2 * ranks
    unit = flags["unit"] or measured.unit
    return Request(ranks, count, costs, measured.num_micro_batches, flags["samples"], unit)


def _simulate(request: Request, flags: dict[str, Any]) -> Plan:
    from drivetrain_megatron.planner.planning import plan_one

    for name in SEARCH_ONLY:
        if flags[name] is not None:
            raise UsageError(f"--{name} is for --search", cure="Add --search, or leave it out.")
    schedules = flags["schedules"]
    if len(schedules) > 1:
        raise UsageError(f"{len(schedules)} schedules; one can be drawn", cure="Name one, or add --search.")
    return plan_one(request, schedules[0] if schedules else "1f1b", flags["stages_per_rank"])


def _search(request: Request, flags: dict[str, Any]) -> tuple[Plan, Found]:
    from drivetrain_megatron.planner import inputs
    from drivetrain_megatron.planner.planning import plan_best

    return plan_best(
        request,
        schedules=flags["schedules"],
        counts=None if flags["counts"] is None else inputs.count_list(flags["counts"]),
        memory=None if flags["memory"] is None else inputs.size(flags["memory"]),
        most_stages_per_rank=flags["stages_per_rank"] or 2,
    )


def _json(drawn: Plan, found: Found | None) -> str:
    from drivetrain_megatron.planner.report import search_data

    tried = {} if found is None else {"candidates": search_data(found)}
    return json.dumps(drawn.data() | tried, indent=2)


def _text(drawn: Plan, found: Found | None, width: int | None) -> str:
    from drivetrain_megatron.planner import text
    from drivetrain_megatron.planner.report import search_lines

    columns = width or shutil.get_terminal_size((100, 24)).columns
    drawing = text.draw(drawn.timeline, width=columns, paint=_paint if sys.stdout.isatty() else None)
    keys = ", ".join(f"{name}: {value}" for name, value in drawn.section().items())
    tried = [] if found is None else [*search_lines(found, drawn.unit), f"To train with it, megatron: {{{keys}}}", ""]
    return "\n".join([*tried, drawn.title(), "", drawing, "", text.LEGEND, *drawn.lines()])


def _paint(piece: str, bar: Bar) -> str:
    letters, ground = PAINTS[bar.action.kind]
    return click.style(piece, fg=letters, bg=ground, dim=bar.chunk > 0)
