"""``drivetrain compare``: compares a run of a script as configured with one on one process, or of another file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.launch import with_trainer
from drivetrain.cli.options import chosen_file, configuration_options, normalise, resolve
from drivetrain.config.keys import AUTO
from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig
    from drivetrain.run_comparison import Record

_NOT_COMPARED = 2
"""Exit code where there is no answer, as click's for a command that is refused."""

_OF_BOTH = ("cpu", "mixed_precision")
"""Flags that hold for a run that another file configures too."""


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": normalise},
    epilog="Ends with 0 if the runs are the same, with 1 if they come apart, with 2 if a run fails "
    "before that is known.",
)
@configuration_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--trainer", is_flag=True, help="Transformers' Trainer in SCRIPT is drivetrain[transformers]'s.")
@click.option("--against", metavar="FILE", help="Compare with the run that this configuration file makes.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Optimizer steps of each run.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=0.01,
    show_default=True,
    help="By which the change of the weights may differ, as a share of it.",
)
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def compare(
    config_file: str | None,
    settings: tuple[str, ...],
    module: bool,
    trainer: bool,
    against: str | None,
    steps: int,
    tolerance: float,
    script: str,
    script_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run the first steps of SCRIPT on one process and as configured, and compare data, losses and weights.

    Without a number of processes it takes one per accelerator, or two on the CPU. Both runs end after some optimizer
    steps, with dropout turned off, in float32 unless --mixed_precision says otherwise, and with batches that the
    processes share (dataloader.split_batches). What the script prints and writes until then it prints and writes twice.

    With --against, FILE says how the first run is made, in place of one process. Of the options, --cpu and
    --mixed_precision hold for both runs, and --num_processes where FILE has none; the others are the second run's.
    """
    config_file, remark = chosen_file(config_file)
    if remark:
        click.echo(remark, err=True)
    flags["mixed_precision"] = flags.get("mixed_precision") or "no"
    resolved = _resolve(config_file, settings, flags)
    if against is None:
        reference = on_one_process(resolved)
    else:
        alike = {name: flags.get(name) for name in _OF_BOTH}
        reference = _resolve(against, (), alike, processes=flags.get("num_processes"))
    command = [script, *script_args]
    if trainer:
        command, module = with_trainer(command, module=module, no_python=False), True
    from drivetrain.run_comparison import Comparison

    with tempfile.TemporaryDirectory(prefix="drivetrain-compare-") as folder:
        one = _run(reference, command, Path(folder, "one"), module=module, steps=steps)
        if one.failed:
            sys.exit(_NOT_COMPARED)
        other = _run(resolved, command, Path(folder, "other"), module=module, steps=steps)
        if against is not None:
            one = one._replace(name=f"{one.name} ({Path(against).name})")
        found = Comparison(one, other, tolerance)
        for line in found.table():
            click.echo(line)
        click.echo(found.verdict())
    sys.exit(1 if found.apart else _NOT_COMPARED if other.failed else int(not found.same))


def _resolve(
    config_file: str | None, settings: tuple[str, ...], flags: dict[str, Any], processes: str | None = None
) -> ResolvedConfig:
    """The configuration of one of the two runs, which shares batches unless it says otherwise.

    Args:
        config_file, settings, flags: as for :func:`drivetrain.cli.options.resolve`.
        processes: their number where the configuration has none.

    Raises:
        UsageError: it cannot be compared by one command.
    """
    resolved = resolve(config_file, settings, flags)
    if "dataloader.split_batches" not in resolved.origins:
        settings = (*settings, "dataloader.split_batches=true")
    _check(resolved)
    if resolved.config.num_processes is not None or processes is None:
        processes = _processes(resolved)
    return resolve(config_file, settings, {**flags, "num_processes": processes})


def _check(resolved: ResolvedConfig) -> None:
    """Refuse what cannot be compared by one command."""
    if resolved.config.distributed_type == AUTO:
        raise UsageError(
            "distributed_type: auto is chosen when a run is launched",
            cure="Name the backend: --distributed_type ddp; `drivetrain plan choose` shows what auto would take.",
        )
    if resolved.config.num_machines not in (None, 1):
        raise UsageError(
            "compare starts both runs on this machine, and num_machines is more than 1",
            cure="Write --num_machines 1 and as many processes as this machine has accelerators, or --cpu.",
        )


def _processes(resolved: ResolvedConfig) -> str | None:
    """The number of processes to be compared with one; ``None`` leaves it to the configuration."""
    from drivetrain.launch.plan import count_devices, make_plan, trains_over

    if resolved.config.num_processes is not None:
        return str(resolved.config.num_processes)
    plan = make_plan(resolved)
    on_cpu = resolved.config.use_cpu or plan.on_cpu or not count_devices()
    takes_two = on_cpu and plan.world_size == 1 and trains_over(resolved.config.distributed_type, 2)
    return "2" if takes_two else None


def on_one_process(resolved: ResolvedConfig) -> ResolvedConfig:
    """The configuration of the same script on one process: without mesh and sections of backends."""
    from drivetrain.config.locate import Origin
    from drivetrain.config.schema import MeshConfig

    ours = {"num_processes": 1, "distributed_type": "single", "mesh": MeshConfig()}
    config = resolved.config.model_copy(
        update={**ours, "plan": resolved.config.plan.model_copy(update={"check": False})}
    )
    # Workers let the environment set what no flag did.
    settled = dict.fromkeys([*ours, "plan.check"], Origin("flag", "drivetrain compare"))
    kept = {key: origin for key, origin in resolved.origins.items() if key.partition(".")[0] not in resolved.sections}
    kept = {key: origin for key, origin in kept.items() if not key.startswith("mesh.")}
    return replace(resolved, config=config, sections={}, origins={**kept, **settled})


def _run(resolved: ResolvedConfig, command: list[str], folder: Path, *, module: bool, steps: int) -> Record:
    """Launch one of the two runs.

    Raises:
        UsageError: it made no step.
        SystemExit: it failed before it made one.
    """
    from drivetrain.launch import script
    from drivetrain.launch.environment import RECORD
    from drivetrain.launch.plan import describe, make_plan
    from drivetrain.run_comparison import Record
    from drivetrain.run_record import SUMMARY

    folder.mkdir()
    script.check_command(command, module=module, no_python=False)
    plan = make_plan(resolved)
    click.echo(describe(plan, resolved), err=True)
    os.environ[RECORD] = json.dumps({"folder": str(folder), "steps": steps})
    try:
        code = script.launch(resolved, command, module=module, plan=plan)
    finally:
        del os.environ[RECORD]
    summary = folder / SUMMARY
    told = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {"steps": []}
    failed = code != 0 and len(told["steps"]) < steps
    if failed:
        which = f"The run on {plan.world_size} process{'es' * (plan.world_size > 1)} ({plan.backend})"
        click.echo(f"{which} failed with exit code {code}. Optimizer steps before: {len(told['steps'])}.", err=True)
        if not told["steps"]:
            sys.exit(_NOT_COMPARED)
    if not told["steps"]:
        raise UsageError(
            f"{command[0]} ended without an optimizer step of a model that accelerator.prepare returned",
            cure="Prepare model and optimizer, and let the script train for at least one step.",
        )
    many = "1 process" if told["processes"] == 1 else f"{told['processes']} processes"
    precision = "" if told["precision"] == "no" else f", {told['precision']}"
    name = f"{told['backend']} on {many}{precision}"
    return Record(folder, told["steps"], name, told["precision"], frozenset(told["buffers"]), failed)
