"""Runs a script on every worker of this node and reports the first failure."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import LaunchError, UsageError
from drivetrain.launch import worker
from drivetrain.launch.coordinator import Departure, Rendezvous, make_rendezvous
from drivetrain.launch.environment import refuse_nested, worker_environment
from drivetrain.launch.failures import file_report, where_they_were
from drivetrain.launch.output import Output
from drivetrain.launch.output import check as check_output
from drivetrain.launch.plan import LaunchPlan, make_plan
from drivetrain.launch.worker import EXIT_RESUMABLE
from drivetrain.launch.workers import (
    StopRequestedError,
    StopSignals,
    first_failure,
    report,
    run_workers,
    start_command,
)

if TYPE_CHECKING:
    from drivetrain.config.resolved import ResolvedConfig


@dataclass(frozen=True)
class Ending:
    """How the workers of this node ended.

    Args:
        code: for the shell.
        how, why: reported to the other nodes.
        error: raised after the report.
    """

    code: int
    how: Departure
    why: str = ""
    error: Exception | None = None


def launch(
    resolved: ResolvedConfig,
    command: Sequence[str],
    *,
    module: bool = False,
    no_python: bool = False,
    plan: LaunchPlan | None = None,
) -> int:
    """Run a script on every worker of this machine and wait for all of them.

    One failing worker stops the others; its traceback, and only that one, is written to stderr. An interrupt stops all
    workers before this returns or raises.

    Args:
        resolved: the configuration; handed to the workers as one value.
        command: the script and its arguments, which are passed on as they are.
        module: the first word is a module's name, as after ``python -m``.
        no_python: the first word is a program to be started without Python in front.
        plan: what :func:`drivetrain.launch.plan.make_plan` made of the configuration; ``None`` = ask it.

    Returns:
        0, or the exit code of the worker that failed first (128 + n when signal n ended it). Told to end by signal n it
        is 128 + n, too, but for SIGTERM to a run that saved itself, or was to and had not begun to train:
        :data:`drivetrain.launch.worker.EXIT_RESUMABLE`.

    Raises:
        ConfigError, BackendError: see :func:`drivetrain.launch.plan.make_plan`; nothing was started.
        UsageError: there is no such script or program.
        EnvironmentVariableError: another launcher started several of this one.
        LaunchError: the rendezvous failed, or a machine that the others need was lost.
    """
    if not command:
        raise UsageError("no script was named", cure="Write: drivetrain launch [options] script.py [its arguments]")
    if module and no_python:
        raise UsageError("--module and --no_python exclude each other", cure="A program has no module's name.")
    if not (module or no_python) and not Path(command[0]).exists():
        raise UsageError(f"there is no script {command[0]!r}", cure="Correct the path, or use -m for a module's name.")
    if no_python and shutil.which(command[0]) is None:
        raise UsageError(
            f"there is no program {command[0]!r}", cure="Correct its name, or leave --no_python out for a script."
        )
    plan = make_plan(resolved) if plan is None else plan
    refuse_nested(plan.num_machines)
    check_output(resolved.config.output, plan.processes_here)
    if resolved.config.debug:
        logging.getLogger(__package__).setLevel(logging.INFO)
        logging.getLogger(__package__).addHandler(logging.StreamHandler())
    words = worker_command(command, module=module, no_python=no_python)
    added = worker_variables(resolved, plan) | {
        worker.PARENT: str(os.getpid()),
        "ROLE_NAME": resolved.config.output.role,
    }
    rendezvous = make_rendezvous(plan)
    ending = _run(words, resolved, plan, rendezvous, added)
    said = str(ending.error)
    sys.stderr.writelines(f"{it}\n" for it in rendezvous.leave(ending.how, ending.why) if it not in said)
    if ending.error is not None:
        raise ending.error
    return ending.code


def _run(
    words: Sequence[str],
    resolved: ResolvedConfig,
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    variables: Mapping[str, str],
) -> Ending:
    """Run the workers, and tell the user how they ended."""
    with (
        tempfile.TemporaryDirectory(prefix="drivetrain-") as folder,
        Output(resolved.config.output, Path(folder)) as output,
        StopSignals(output, plan.processes_here) as signals,
    ):
        try:
            failures = run_workers(start_command(words), plan, output, signals, rendezvous, variables)
        except LaunchError as error:
            output.close()
            sys.stderr.write(where_they_were(output.records))
            return Ending(1, "stopped", error=error)
        except OSError as error:
            return Ending(1, "failed", f"its launcher failed: {error}", error)
        except StopRequestedError as stop:
            signals.kill_leftovers()
            if resolved.config.save_on_interrupt and signals.was_starting(stop.received):
                return _stopped_while_starting()
            sys.stderr.write(f"stopped by {stop.received.name}; no worker is left\n")
            return Ending(128 + stop.received, "interrupted", f"was stopped by {stop.received.name}")
        if failures:
            # A scheduler that signals every process may reach the workers before this one.
            if resolved.config.save_on_interrupt and signals.was_starting(-(failures[0].exit_code or 0)):
                signals.kill_leftovers()
                return _stopped_while_starting()
            sys.stderr.write(report(failures, output))
            path = file_report(failures, resolved.config.project_dir)
            sys.stderr.write("" if path is None else f"With the stacks of all ranks: {path}\n")
            return Ending(failures[0].shell_code, "failed", first_failure(failures))
        if code := signals.exit_code():
            sys.stderr.write("the run saved itself and stopped; started again, it goes on\n")
            return Ending(code, "interrupted", "saved itself and stopped")
        return Ending(0, "finished")


def _stopped_while_starting() -> Ending:
    """The ending of a run that saves itself on a signal, but was stopped before it had anything to save."""
    sys.stderr.write("stopped by SIGTERM before the training began; started again, it goes on from its checkpoint\n")
    return Ending(EXIT_RESUMABLE, "interrupted", "was stopped by SIGTERM before the training began")


def worker_command(command: Sequence[str], *, module: bool, no_python: bool) -> list[str]:
    """The command of each worker."""
    if no_python:
        return list(command)
    # Unbuffered, so that lines of different ranks arrive when they are written.
    return [sys.executable, "-u", worker.__file__, *(["-m"] if module else []), *command]


def worker_variables(resolved: ResolvedConfig, plan: LaunchPlan) -> dict[str, str]:
    """The environment variables of each worker, besides its ranks."""
    if plan.on_cpu and resolved.config.accelerator_ids is not None:  # no accelerator was chosen
        resolved = replace(resolved, config=resolved.config.model_copy(update={"use_cpu": True}))
    return worker_environment(resolved.to_json(), plan.processes_here) | dict(plan.selection.variables)
