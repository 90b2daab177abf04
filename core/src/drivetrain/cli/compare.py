"""``drivetrain compare``: runs a script on one process and as configured, and says where the two come apart."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from drivetrain.cli.launch import with_trainer
from drivetrain.cli.options import chosen_file, configuration_options, normalise, resolve
from drivetrain.config.keys import AUTO
from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.config import ResolvedConfig

_LOSS_TOLERANCE = 1e-5
_DATA_TOLERANCE = 1e-6

DATA = (
    "The weights are the same before step {step}, and the step reads other numbers: {what}. Each process is given a "
    "share of a batch, and the shares are the batch of one process where the loader is prepared with split_batches, "
    "which this command sets unless the script or the configuration says otherwise. Samples that draw random numbers "
    "when they are read, or a sampler of the script's own, may give each process others."
)
FORWARD = (
    "Up to step {step} weights and data are the same, and in it the loss is {ours:.6g} instead of {theirs:.6g}. "
    "Something in the forward or in the loss depends on which rows a process has: a statistic of the batch (batch "
    "norm, x - x.mean(0), normalised weights, pairs of rows), a mean over some of the rows, or random numbers."
)
GRADIENTS = (
    "Up to step {step} weights, data and loss are the same, and the step leaves other weights. Look at what happens "
    "between the loss and the step: the loss may be a sum or be scaled by a number of this process, gradients may be "
    "read or changed by hand, or the optimizer may keep something that differs between processes."
)
START = (
    "The weights differ before the first step. Call set_seed(...) before the model is made, so that every run begins "
    "with the same ones."
)
_ROUNDING = (
    "The script computes in {precision}, whose rounding alone may change weights by some hundredths of their change; "
    "Accelerator(mixed_precision='no') tells whether that is all."
)
_PAGE = (
    "The page 'One process and several' of the documentation lists what differs, and the line that means the same on "
    "both."
)


class Record(NamedTuple):
    """A record of a run: see :class:`drivetrain.run_record.RunRecord`."""

    folder: Path
    steps: Sequence[Mapping[str, float]]
    name: str
    precision: str = "no"

    def weights(self, number: int) -> dict[str, Tensor]:
        """The weights after this many steps."""
        from drivetrain.run_record import read_weights

        return read_weights(self.folder, number)


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": normalise},
    epilog="Ends with 0 if the runs are the same, with 1 if they come apart.",
)
@configuration_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--trainer", is_flag=True, help="Transformers' Trainer in SCRIPT is drivetrain[transformers]'s.")
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
    """
    config_file, remark = chosen_file(config_file)
    if remark:
        click.echo(remark, err=True)
    flags["mixed_precision"] = flags.get("mixed_precision") or "no"
    resolved = resolve(config_file, settings, flags)
    if "dataloader.split_batches" not in resolved.origins:
        settings = (*settings, "dataloader.split_batches=true")
    _check(resolved)
    resolved = resolve(config_file, settings, {**flags, "num_processes": _processes(resolved)})
    command = [script, *script_args]
    if trainer:
        command, module = with_trainer(command, module=module, no_python=False), True
    with tempfile.TemporaryDirectory(prefix="drivetrain-compare-") as folder:
        one = _run(on_one_process(resolved), command, Path(folder, "one"), module=module, steps=steps)
        other = _run(resolved, command, Path(folder, "other"), module=module, steps=steps)
        found = Comparison(one, other, tolerance)
        for line in found.table():
            click.echo(line)
        click.echo(found.verdict())
    sys.exit(0 if found.same else 1)


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
    """
    from drivetrain.launch import script
    from drivetrain.launch.environment import RECORD
    from drivetrain.launch.plan import describe, make_plan
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
    if code and len(told["steps"]) < steps:
        click.echo(f"This run failed after {len(told['steps'])} steps, so that nothing is compared.", err=True)
        sys.exit(code)
    if not told["steps"] or not told["models"]:
        raise UsageError(
            f"{command[0]} ended without an optimizer step of a model that accelerator.prepare returned",
            cure="Prepare model and optimizer, and let the script train for at least one step.",
        )
    many = "1 process" if told["processes"] == 1 else f"{told['processes']} processes"
    precision = "" if told["precision"] == "no" else f", {told['precision']}"
    return Record(folder, told["steps"], f"{told['backend']} on {many}{precision}", told["precision"])


class Comparison:
    """Comparison of two records, step by step.

    Args:
        one: of one process.
        other: of the run that is in question.
        tolerance: share of the weights' change by which it may differ.
    """

    def __init__(self, one: Record, other: Record, tolerance: float) -> None:
        self._one, self._other, self._tolerance = one, other, tolerance
        self._number = min(len(one.steps), len(other.steps))
        start = one.weights(0)
        self._changes = [_difference(start, start, other.weights(0))]
        self._changes += [
            _difference(start, one.weights(step), other.weights(step)) for step in range(1, self._number + 1)
        ]

    @property
    def same(self) -> bool:
        """Whether both made as many steps, with the same weights after each."""
        return self._first() is None and len(self._one.steps) == len(self._other.steps)

    def _first(self) -> int | None:
        """Number of steps after which the weights differ first; ``None`` where they do not."""
        return next(filter(self._is_apart, range(len(self._changes))), None)

    def _is_apart(self, step: int) -> bool:
        """Whether the weights differ; a little counts too where the losses of the step differ, as by no rounding."""
        share = self._changes[step].share
        if share > self._tolerance:
            return True
        return step > 0 and share > self._tolerance / 100 and not self._same_loss(step)

    def table(self) -> list[str]:
        """One line for each step."""
        rows = [("step", "rows", "data", "loss", "weights"), ("0", "", "", "", self._weights(0))]
        for step in range(1, self._number + 1):
            one, other = self._one.steps[step - 1], self._other.steps[step - 1]
            losses = f"{one['loss']:.6g}"
            if not self._same_loss(step):
                losses += f" / {other['loss']:.6g}"
            numbers = f"{one['rows']:g}" if one["rows"] == other["rows"] else f"{one['rows']:g} / {other['rows']:g}"
            data = "different" if self._other_data(step) else "same"
            rows.append((str(step), numbers, data, losses, self._weights(step)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return ["", f"{self._one.name} / {self._other.name}", *lines, ""]

    def verdict(self) -> str:
        """Say whether the runs are the same, and where to look if not."""
        step = self._first()
        if step is None:
            if len(self._one.steps) != len(self._other.steps):
                numbers = f"{len(self._one.steps)} steps on one process, {len(self._other.steps)} as configured"
                return (
                    f"What both have done is the same (steps: {self._number}), then one run ends: {numbers}. A "
                    "loader that is prepared with split_batches has as many batches on both."
                )
            many = "1 step leaves" if self._number == 1 else f"{self._number} steps leave"
            return f"The same: {many} the same weights."
        if step == 0:
            return START
        found = self._other_data(step)
        if found:
            text = DATA.format(step=step, what=found)
        elif not self._same_loss(step):
            one, other = self._one.steps[step - 1], self._other.steps[step - 1]
            text = FORWARD.format(step=step, ours=other["loss"], theirs=one["loss"])
        else:
            text = GRADIENTS.format(step=step)
        if self._other.precision != "no":
            text = f"{text} {_ROUNDING.format(precision=self._other.precision)}"
        return f"{text} {_PAGE}"

    def _weights(self, step: int) -> str:
        change = self._changes[step]
        if not self._is_apart(step):
            return "same" if not change.share else f"same ({change.share:.0e} of their change)"
        return f"different ({change.share:.0e} of their change): {', '.join(change.names)}"

    def _same_loss(self, step: int) -> bool:
        one, other = (record.steps[step - 1]["loss"] for record in (self._one, self._other))
        return math.isclose(one, other, rel_tol=_LOSS_TOLERANCE, abs_tol=1e-7)

    def _other_data(self, step: int) -> str:
        """Describe what differs in the data of a step; empty where nothing does."""
        one, other = self._one.steps[step - 1], self._other.steps[step - 1]
        if one["rows"] != other["rows"]:
            return f"{one['rows']:g} rows on one process, {other['rows']:g} as configured"
        scale = max(abs(one["sum"]), math.sqrt(one["squares"]))
        alike = math.isclose(one["sum"], other["sum"], rel_tol=0, abs_tol=_DATA_TOLERANCE * scale)
        if alike and math.isclose(one["squares"], other["squares"], rel_tol=_DATA_TOLERANCE):
            return ""
        return f"as many rows ({one['rows']:g}) with other values"


class _Change(NamedTuple):
    """Difference of two runs' weights, as a share of how much they have changed, and the three that differ most."""

    share: float
    names: list[str]


def _difference(start: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> _Change:
    """Compare weights by name.

    Raises:
        UsageError: the runs have other weights.
    """
    unlike = sorted(one.keys() ^ other.keys())
    unlike += sorted(name for name in one.keys() & other.keys() if one[name].shape != other[name].shape)
    if unlike:
        raise UsageError(
            f"the runs train models of other weights: {', '.join(unlike[:3])} differs",
            cure="Let the script make the same model however many processes there are.",
        )
    apart, moved = {}, {}
    for name, value in one.items():
        apart[name] = float((other[name].double() - value.double()).norm())
        moved[name] = float((value.double() - start[name].double()).norm())
    total = math.hypot(*moved.values()) or math.hypot(*(float(value.double().norm()) for value in start.values()))
    share = math.hypot(*apart.values()) / total if total else 0.0
    names = sorted(apart, key=lambda name: apart[name] / (moved[name] or 1e-12), reverse=True)
    return _Change(share, [name for name in names if apart[name]][:3])
