"""Runs a script on every worker of this node and reports the first failure."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import BackendNotFoundError, UsageError
from drivetrain.launch import worker
from drivetrain.launch.coordinator import TOKEN, RunIdentity, make_rendezvous
from drivetrain.launch.environment import PREDICTION, refuse_nested, worker_environment
from drivetrain.launch.output import check as check_output
from drivetrain.launch.plan import LaunchPlan, make_plan
from drivetrain.launch.workers import run_workers, start_command
from drivetrain.registry import get_registry, pip_line

if TYPE_CHECKING:
    from drivetrain.config.resolved import ResolvedConfig


def check_command(command: Sequence[str], *, module: bool, no_python: bool) -> None:
    """Check that what is to be run is there; for the arguments see :func:`launch`.

    Raises:
        UsageError: there is no such script or program.
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
    check_command(command, module=module, no_python=no_python)
    plan = make_plan(resolved) if plan is None else plan
    refuse_nested(plan.num_machines)
    check_output(resolved.config.output, plan.processes_here)
    if resolved.config.debug:
        logging.getLogger(__package__).setLevel(logging.INFO)
        logging.getLogger(__package__).addHandler(logging.StreamHandler())
    words = worker_command(command, module=module, no_python=no_python)
    variables = worker_variables(resolved, plan)
    if resolved.config.plan.check:
        variables[PREDICTION] = json.dumps(predict(resolved, plan))
    ending = run_workers(
        start_command(words),
        plan,
        make_rendezvous(plan, identify(resolved, plan, command)),
        variables | {worker.PARENT: str(os.getpid()), "ROLE_NAME": resolved.config.output.role},
        sys.stderr.write,
        output=resolved.config.output,
        saves=resolved.config.save_on_interrupt,
        project_dir=resolved.config.project_dir,
    )
    if ending.error is not None:
        raise ending.error
    if ending.out_of_memory:
        sys.stderr.write(_memory_advice(resolved, plan))
    return ending.code


def predict(resolved: ResolvedConfig, plan: LaunchPlan) -> Mapping[str, Any]:
    """Predict what the layout of a configuration holds, by the planner that is installed.

    Raises:
        BackendNotFoundError: none is.
        UsageError: as the planner does; ``plan:`` says too little, or the backend gives no estimate.
    """
    predicted = get_registry().predict(resolved, plan)
    if predicted is None:
        raise BackendNotFoundError(
            "plan.check compares a run with what a planner predicts, and none is installed",
            cure=f"Run: {pip_line('planner')}",
        )
    return predicted


def _memory_advice(resolved: ResolvedConfig, plan: LaunchPlan) -> str:
    """Lines about what could be changed after an error of memory. The run has failed already: nothing is raised."""
    try:
        advice = get_registry().out_of_memory(resolved, plan)
    except Exception as error:  # noqa: BLE001 - said; the exit code is the run's
        return f"What other layouts hold could not be predicted: {error}\n"
    install = f"{pip_line('planner')}, then drivetrain plan memory, says what other layouts hold"
    return f"{install if advice is None else advice}\n"


_JOBS = (
    "SLURM_HET_JOB_ID",  # the components of a heterogeneous job have numbers of their own
    *("SLURM_JOB_ID", "PET_RDZV_ID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID", "AZUREML_RUN_ID", "TRAINING_JOB_NAME"),
)
"""Variables by which schedulers number their jobs, the same on all machines of one."""

_LOCAL_KEYS = frozenset(
    {"num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"}
    | {"accelerator_ids", "device_order", "project_dir", "output", "rendezvous", "monitor_interval", "debug"}
)
"""Keys that may differ between the machines of one run, and those that the plan has settled."""


def identify(
    resolved: ResolvedConfig, plan: LaunchPlan, command: Sequence[str], environ: Mapping[str, str] | None = None
) -> RunIdentity:
    """Return the identity shared by the launchers of one run: its name, and digests of configuration and command.

    Args:
        resolved: the configuration. Folders, devices and addresses are each machine's own.
        plan: number of machines and processes.
        command: the script, of which the folder does not count, and its arguments.
        environ: the environment; ``None`` = this process's.
    """
    environ = os.environ if environ is None else environ
    said: dict[str, object] = resolved.config.model_dump(mode="json", exclude=set(_LOCAL_KEYS))
    said |= {f"the section {name}": section for name, section in resolved.sections.items()}
    said |= {"num_machines": plan.machines, "num_processes": plan.world_size}
    said["the command"] = [Path(command[0]).name, *command[1:]]
    digests = {name: json.dumps(value, sort_keys=True, default=str) for name, value in said.items()}
    facts = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in digests.items()}
    given = plan.rendezvous.run_id
    number = next((environ[name] for name in _JOBS if environ.get(name)), "")
    return RunIdentity(given or number, given is not None, facts, environ.get(TOKEN, ""))


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
