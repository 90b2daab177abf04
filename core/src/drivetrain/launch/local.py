"""Start a command's workers on this machine, alone or among others, and report the first failure once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import LaunchError, UsageError
from drivetrain.launch import alone, elastic, worker
from drivetrain.launch.elastic import quiet_logs
from drivetrain.launch.environment import refuse_nested, worker_environment
from drivetrain.launch.failures import explain, failures_of, file_report, where_they_were
from drivetrain.launch.output import Output
from drivetrain.launch.output import check as check_output
from drivetrain.launch.plan import LaunchPlan, make_plan
from drivetrain.launch.rendezvous.hosting import import_torch_quietly
from drivetrain.launch.stopping import EXIT_RESUMABLE, Stopping, ToldToEndError

if TYPE_CHECKING:
    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.launch.machines import Fate
    from drivetrain.launch.rendezvous.handlers import OneMachine
    from drivetrain.launch.rendezvous.meeting import Meeting


@dataclass(frozen=True)
class Ending:
    """How the workers of this machine ended.

    Args:
        code: for the shell.
        fate, why: what the other machines are told.
        error: raised after they were told.
    """

    code: int
    fate: Fate
    why: str = ""
    error: LaunchError | None = None


Start = Callable[[Output, Stopping], dict[int, int | None]]
"""Starts workers and waits for them; returns exit codes by global rank of those that did not end well."""


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
        ``stopping.EXIT_RESUMABLE``.

    Raises:
        ConfigError, BackendError: see :func:`drivetrain.launch.plan.make_plan`; nothing was started.
        UsageError: there is no such script or program.
        EnvironmentVariableError: another launcher started several of this one.
        LaunchError: machines did not meet, or one that the others need was lost.
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
    words = worker_command(command, module=module, no_python=no_python)
    added = worker_variables(resolved, plan)
    added[worker.PARENT] = str(os.getpid())

    if plan.num_machines > 1:
        return _among_machines(words, plan, resolved, added)
    with quiet_logs((__package__,), resolved.config.debug):
        ending = _end_of(
            lambda output, stopping: alone.run(words, plan, output, stopping, added), resolved, plan.processes_here
        )
    if ending.error is not None:
        raise ending.error
    return ending.code


def _among_machines(words: Sequence[str], plan: LaunchPlan, resolved: ResolvedConfig, added: Mapping[str, str]) -> int:
    """Be one of several machines; the others are told how it ended."""
    import_torch_quietly()
    import torch.distributed.launcher.api  # noqa: F401 - so that its logs are there to be quiet

    from drivetrain.launch.rendezvous.handlers import rendezvous_of

    meeting = rendezvous_of(plan)
    with elastic.agent_surroundings(added, resolved.config.debug):
        ending = _end_of(
            lambda output, stopping: elastic.run(words, plan, output, stopping, meeting), resolved, plan.processes_here
        )
    return _leave(meeting, ending)


def _end_of(start: Start, resolved: ResolvedConfig, workers: int) -> Ending:
    """Start the workers, wait, and tell the user how they ended."""
    with (
        tempfile.TemporaryDirectory(prefix="drivetrain-") as folder,
        Output(resolved.config.output, Path(folder)) as output,
        Stopping(lambda: output.records, workers) as stopping,
    ):
        try:
            failed = start(output, stopping)
        except LaunchError as error:
            output.close()
            sys.stderr.write(where_they_were(output.records))
            return Ending(1, "stopped", error=error)
        except ToldToEndError as told:
            stopping.end_leftovers()
            if resolved.config.save_on_interrupt and stopping.starts_again(told.received):
                return _stopped_while_starting()
            sys.stderr.write(f"stopped by {told.received.name}; no worker is left\n")
            return Ending(128 + told.received, "gone", f"was stopped by {told.received.name}")
        if failed:
            failures = failures_of(failed, output.records)
            # A scheduler that tells every process may reach the workers before it reaches this one.
            if resolved.config.save_on_interrupt and stopping.starts_again(-(failures[0].exit_code or 0)):
                stopping.end_leftovers()
                return _stopped_while_starting()
            output.close()  # the report goes below everything that the workers wrote
            sys.stderr.write(f"{output.last_words(failures[0].rank)}{explain(failures)}\n")
            path = file_report(failures, resolved.config.project_dir)
            sys.stderr.write("" if path is None else f"With the stacks of all ranks: {path}\n")
            return Ending(failures[0].shell_code, "failed", f"rank {failures[0].rank} failed: {failures[0]}")
        if code := stopping.exit_code():
            sys.stderr.write("the run saved itself and stopped; started again, it goes on\n")
            return Ending(code, "gone", "saved itself and stopped")
        return Ending(0, "finished")


def _stopped_while_starting() -> Ending:
    """Of a run that saves itself when it is told to end; it had nothing to save yet."""
    sys.stderr.write("stopped by SIGTERM before the training began; started again, it goes on from its checkpoint\n")
    return Ending(EXIT_RESUMABLE, "gone", "was stopped by SIGTERM before the training began")


def _leave(meeting: OneMachine | Meeting, ending: Ending) -> int:
    """Tell the other machines how this one ended, and the user what is known of them."""
    said = str(ending.error)
    sys.stderr.writelines(f"{it}\n" for it in meeting.leave(ending.fate, ending.why) if it not in said)
    if ending.error is not None:
        raise ending.error
    if ending.fate == "finished" and meeting.verdict():
        raise LaunchError(meeting.verdict())
    return ending.code


def worker_command(command: Sequence[str], *, module: bool, no_python: bool) -> list[str]:
    """What is started for each worker."""
    if no_python:
        return list(command)
    # Unbuffered, so that lines of different ranks arrive when they are written.
    return [sys.executable, "-u", worker.__file__, *(["-m"] if module else []), *command]


def worker_variables(resolved: ResolvedConfig, plan: LaunchPlan) -> dict[str, str]:
    """What is added to the environment of each worker, besides what the agent says about ranks."""
    return worker_environment(_handed_over(resolved, plan), plan.processes_here) | dict(plan.selection.variables)


def _handed_over(resolved: ResolvedConfig, plan: LaunchPlan) -> str:
    """The configuration as the workers get it: a run for which no accelerator was chosen stays on the CPU."""
    if plan.on_cpu and resolved.config.accelerator_ids is not None:
        resolved = replace(resolved, config=resolved.config.model_copy(update={"use_cpu": True}))
    return resolved.to_json()
