"""Start a command's workers on this machine through torch's elastic agent, and report the first failure once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import UsageError
from drivetrain.launch import worker
from drivetrain.launch.environment import worker_environment
from drivetrain.launch.failures import STOPPING, explain, failures_of
from drivetrain.launch.plan import LaunchPlan, make_plan

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from drivetrain.config.resolved import ResolvedConfig

_AGENT_LOGS = ("torch.distributed.elastic", "torch.multiprocessing")


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
        0, or the exit code of the worker that failed first (128 + n when signal n ended it).

    Raises:
        ConfigError, BackendError: see :func:`drivetrain.launch.plan.make_plan`; nothing was started.
        UsageError: there is no such script.
    """
    if not command:
        raise UsageError("no script was named", cure="Write: drivetrain launch [options] script.py [its arguments]")
    if module and no_python:
        raise UsageError("--module and --no_python exclude each other", cure="A program has no module's name.")
    if not (module or no_python) and not Path(command[0]).exists():
        raise UsageError(f"there is no script {command[0]!r}", cure="Correct the path, or use -m for a module's name.")
    plan = make_plan(resolved) if plan is None else plan
    words = worker_command(command, module=module, no_python=no_python)
    added = worker_variables(resolved, plan)
    added[worker.PARENT] = str(os.getpid())

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with tempfile.TemporaryDirectory(prefix="drivetrain-") as logs, agent_surroundings(added, resolved.config.debug):
        try:
            elastic_launch(launch_config(plan, logs), words[0])(*words[1:])
        except ChildFailedError as error:
            failures = failures_of(error, Path(logs))
            sys.stderr.write(f"{explain(failures)}\n")
            return failures[0].shell_code
        except SignalException as error:
            sys.stderr.write(f"stopped by {error.sigval.name}; no worker is left\n")
            return 128 + error.sigval
    return 0


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


def launch_config(plan: LaunchPlan, logs: str, **further: Any) -> LaunchConfig:
    """Return a plan in the words of torch's elastic agent.

    Args:
        plan: what to start.
        logs: an existing folder for the files in which workers report failures.
        further: fields of ``LaunchConfig`` that only one caller needs.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    configs: dict[str, Any] = {}
    if plan.rdzv_backend == "static":
        configs["rank"] = plan.machine_rank
    elif plan.num_machines > 1:
        configs["is_host"] = plan.machine_rank == 0
        warnings.warn(
            f"under rdzv_backend: c10d, machine_rank: {plan.machine_rank} only says who hosts the meeting; which"
            " machine gets rank 0 is settled there. Write rdzv_backend: static to number machines by machine_rank.",
            stacklevel=2,
        )
    fields: dict[str, Any] = {
        "min_nodes": plan.num_machines,
        "max_nodes": plan.num_machines,
        "nproc_per_node": plan.processes_here,
        # Machines of one job find each other by this name; a job of one machine must not find another job.
        "run_id": "drivetrain" if plan.num_machines > 1 else uuid.uuid4().hex,
        "rdzv_backend": plan.rdzv_backend,
        "rdzv_endpoint": plan.rdzv_endpoint,
        "rdzv_configs": configs,
        "max_restarts": plan.max_restarts,
        "monitor_interval": plan.monitor_interval,
        # A container's own host name often does not resolve.
        "local_addr": "127.0.0.1" if plan.num_machines == 1 else None,
        "logs_specs": DefaultLogsSpecs(log_dir=logs),
    }
    return LaunchConfig(**{**fields, **further})


@contextlib.contextmanager
def agent_surroundings(added: Mapping[str, str], debug: bool = False) -> Iterator[None]:
    """Lend the elastic agent an environment, its signals and a quiet log, and take all three back afterwards.

    Args:
        added: variables for the workers; they inherit this process's environment.
        debug: let the agent's own log messages through.
    """
    environ = dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in STOPPING if hasattr(signal, name)}
    # Each of torch's loggers has a level of its own, so that setting their parent's is not enough.
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGS)]
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    os.environ.update(added)
    if not debug:
        for log in logs:  # what it logs about a failure, explain() says shorter
            log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        os.environ.clear()
        os.environ.update(environ)
        if in_main:
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)
