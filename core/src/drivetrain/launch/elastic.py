"""Torch's elastic agent, as our launchers use it: for several machines, and for functions of a notebook."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.launch.failures import STOPPING
from drivetrain.launch.output import Output
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.stopping import Stopping, ToldToEndError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    from drivetrain.launch.rendezvous.handlers import OneMachine
    from drivetrain.launch.rendezvous.meeting import Meeting

_LOGS = ("torch.distributed.elastic", "torch.multiprocessing")


def run(
    command: Sequence[str], plan: LaunchPlan, output: Output, stopping: Stopping, meeting: OneMachine | Meeting
) -> dict[int, int | None]:
    """Start the workers of this machine through the agent, which asks ``meeting`` when, and wait for them.

    Args:
        command: what is started for each worker; it inherits this process's environment.
        plan: of a run on several machines.
        output: what becomes of what the workers write.
        stopping: what happens when this launcher is told to end; entered.
        meeting: how the machines find each other.

    Returns:
        Exit codes by global rank of those that did not end well; empty when all did.

    Raises:
        LaunchError: machines did not meet, or the run is over for all of them.
        ToldToEndError: as ``stopping`` says; the workers have been stopped.
    """
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    def told(received: signal.Signals) -> Exception:
        return api.SignalException(f"told to end by {received.name}", sigval=received)

    # The agent installs this handler of its own at every start of workers; only newer ones can be told not to.
    agents, api._terminate_process_handler = api._terminate_process_handler, stopping.on_signal  # noqa: SLF001
    try:
        with stopping.raising(told):
            elastic_launch(launch_config(plan, output, meeting), command[0])(*command[1:])
    except ChildFailedError as error:
        return codes_of(error)
    except api.SignalException as error:
        raise ToldToEndError(error.sigval) from None
    finally:
        api._terminate_process_handler = agents  # noqa: SLF001
    return {}


def codes_of(error: ChildFailedError) -> dict[int, int | None]:
    """Exit codes by global rank, from the agent's own error; ``None`` for a signal by which it may have stopped it."""
    stopped = {-getattr(signal, name) for name in STOPPING if hasattr(signal, name)}
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {rank: None if code in stopped else code for rank, code in codes.items()}


def launch_config(plan: LaunchPlan, output: Output, meeting: OneMachine | Meeting, **further: Any) -> LaunchConfig:
    """Return a plan in the words of torch's elastic agent.

    Args:
        plan: what to start.
        output: what becomes of what the workers write.
        meeting: how the processes find each other.
        further: fields of ``LaunchConfig`` that only one caller needs.
    """
    from torch.distributed.launcher.api import LaunchConfig

    fields: dict[str, Any] = {
        "min_nodes": plan.fewest_machines or plan.num_machines,
        "max_nodes": plan.num_machines,
        "nproc_per_node": plan.processes_here,
        "run_id": meeting.get_run_id(),
        "rdzv_backend": meeting.get_backend(),
        "rdzv_configs": {"handler": meeting},
        "max_restarts": plan.max_restarts,
        "monitor_interval": plan.monitor_interval,
        "logs_specs": output,
        "role": output.role,
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
    os.environ.update(added)
    try:
        with quiet_logs(_LOGS, debug):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        if in_main:
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def quiet_logs(names: tuple[str, ...], debug: bool) -> Iterator[None]:
    """Say nothing through these logs and those below them, unless ``debug``."""
    # Each of torch's loggers has a level of its own, so that setting their parent's is not enough.
    logs = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(names)]
    levels = [log.level for log in logs]
    if not debug:
        for log in logs:  # what they say about a failure, explain() says shorter
            log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
