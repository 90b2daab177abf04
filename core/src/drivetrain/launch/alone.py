"""Start and watch the workers of a run on one machine. Without torch's agent, for which they would have to wait."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence

from drivetrain.launch.output import Output
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.processes import Workers
from drivetrain.launch.rendezvous.hosting import LOOPBACK, Host
from drivetrain.launch.stopping import Stopping, ToldToEndError

_log = logging.getLogger(__name__)
_NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""A collective that fails ends its process, as under torchrun, unless the user says otherwise."""

_SENT = (-signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of workers that were stopped, where they had not ended before."""


def run(
    command: Sequence[str], plan: LaunchPlan, output: Output, stopping: Stopping, variables: Mapping[str, str]
) -> dict[int, int | None]:
    """Start the workers, again after a failure as often as the plan says, and wait until all of them have ended.

    Args:
        command: what is started for each worker.
        plan: of a run on one machine.
        output: what becomes of what the workers write.
        stopping: what happens when this launcher is told to end; entered.
        variables: added to this process's environment for every worker.

    Returns:
        Exit codes by rank of those that did not end well in the last start, ``None`` for those that were stopped for
        the sake of the others; empty when all ended well.

    Raises:
        LaunchError: the port is taken.
        ToldToEndError: as ``stopping`` says; the workers have been stopped by the same signal.
        OSError: the command cannot be started.
    """
    inherited = {_NCCL: "1", **os.environ, **variables, "ROLE_NAME": output.role}
    run_id = uuid.uuid4().hex
    for restart in range(plan.max_restarts + 1):
        host, workers = Host(int(plan.rdzv_endpoint.rpartition(":")[2])), Workers()
        environments = {
            rank: {**inherited, **_place(plan, rank), **_start(host, restart, plan), "TORCHELASTIC_RUN_ID": run_id}
            for rank in range(plan.processes_here)
        }
        try:
            with stopping.held():  # a process that is being started has to be known before it can be stopped
                streams = output.open(environments)
                workers.start(command, environments, streams.stdouts, streams.stderrs)
            host.serve()
            failed = _watch(workers, host, plan.monitor_interval)
        except ToldToEndError as told:
            workers.stop(told.received)
            raise
        finally:
            workers.stop()
            host.close()
        if not failed:
            break
    return failed


def _watch(workers: Workers, host: Host, interval: float) -> dict[int, int | None]:
    """Wait until all have ended well, or stop all as soon as one has not. Returns as :func:`run`."""
    while True:
        time.sleep(interval)
        host.check()
        codes = workers.exit_codes()
        if any(codes.values()):
            _log.warning("exit codes by rank: %s; the others are stopped", codes)
            workers.stop()
            ended = {rank: None if code in _SENT else code for rank, code in workers.exit_codes().items() if code != 0}
            return {**ended, **{rank: code for rank, code in codes.items() if code}}
        if None not in codes.values():
            return {}


def _place(plan: LaunchPlan, rank: int) -> dict[str, str]:
    """What torchrun tells a worker about its place among the others."""
    here = plan.processes_here
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= {"WORLD_SIZE": here, "LOCAL_WORLD_SIZE": here, "ROLE_WORLD_SIZE": here}
    return {name: str(number) for name, number in numbers.items()}


def _start(host: Host, restart: int, plan: LaunchPlan) -> dict[str, str]:
    """What torchrun tells it about this start, and where the workers meet."""
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
