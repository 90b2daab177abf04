"""Runs a function on several forked processes, from a notebook or, for debugging, on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import Any

from drivetrain.config.schema import OutputConfig, RendezvousConfig
from drivetrain.errors import LaunchError, UsageError
from drivetrain.launch import worker
from drivetrain.launch.coordinator import TOKEN, RunIdentity, make_rendezvous
from drivetrain.launch.environment import LAUNCHER, available_cores, patch_environment
from drivetrain.launch.plan import LaunchPlan, check_backend, count_devices
from drivetrain.launch.workers import Start, run_workers


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run ``function(*args)`` on several processes of this machine, forked from this one, and wait for them.

    With one process the function runs in this one. Return values of forked processes are lost.

    Args:
        function: the training function; it creates the ``Accelerator`` itself.
        args: its positional arguments.
        num_processes: processes on this machine; ``None`` = one per accelerator, or one.
        mixed_precision: for an ``Accelerator()`` in the function that names none: ``"no"``, ``"bf16"`` or ``"fp16"``.
        use_port: port of the rendezvous.
        master_addr: address of machine 0.
        node_rank: index of this machine.
        num_nodes: machines in the job; this function is called on each.
        rdzv_backend: ``"static"`` or ``"c10d"``; machines are numbered by ``node_rank`` either way.
        rdzv_endpoint: address of the rendezvous, ``host:port``; empty = ``master_addr:use_port``.
        rdzv_conf: how long machines wait for each other: ``{"timeout": 60}``, in seconds.
        rdzv_id: name of the job, ``TORCHELASTIC_RUN_ID`` of the processes.
        max_restarts: how often all processes are started again after one failed.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: accepted, and without effect: processes write where the notebook does.

    Raises:
        LaunchError: a process failed (its traceback is in the message), or processes cannot be forked from here.
        BackendError: no installed backend can train over this many processes.
    """
    here = max(1, count_devices()) if num_processes is None else num_processes
    if here < 1 or num_nodes < 1:
        raise UsageError(f"num_processes is {here} and num_nodes is {num_nodes}", cure="Both count from 1.")
    if not 0 <= node_rank < num_nodes:
        raise UsageError(f"node_rank is {node_rank} and num_nodes is {num_nodes}", cure="Ranks of nodes count from 0.")
    if mixed_precision not in {"no", "bf16", "fp16"}:
        raise UsageError(f"mixed_precision is {mixed_precision!r}", cure="Write 'no', 'bf16' or 'fp16'.")
    plan = LaunchPlan(
        world_size=here * num_nodes,
        processes_here=here,
        num_machines=num_nodes,
        machine_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{use_port}",
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        rendezvous=_patience(rdzv_backend, rdzv_conf or {}),
    )
    del log_line_prefix_template
    if plan.world_size == 1:
        with patch_environment(DRIVETRAIN_MIXED_PRECISION=mixed_precision):
            function(*args)
        return
    variables = {"DRIVETRAIN_MIXED_PRECISION": mixed_precision, "TORCHELASTIC_RUN_ID": rdzv_id}
    _fork_workers(function, args, plan, variables)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run ``function(*args)`` on several CPU processes that talk over gloo, forked from this one, and wait for them.

    For debugging and testing: no accelerator is used. The function's return value is lost.

    Args:
        function: any function; inside it ``Accelerator()`` or ``torch.distributed.init_process_group()`` just works.
        args: its positional arguments.
        num_processes: how many.

    Raises:
        LaunchError: a process failed; its rank and traceback are in the message.
        BackendError: no installed backend can train over this many processes.
    """
    if num_processes < 1:
        raise UsageError(f"num_processes is {num_processes}", cure="Write 1 or more.")
    plan = LaunchPlan(world_size=num_processes, processes_here=num_processes, monitor_interval=0.02)
    _fork_workers(function, args, plan, {"DRIVETRAIN_USE_CPU": "true"})


def _fork_workers(
    function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan, variables: Mapping[str, str]
) -> None:
    """Fork the processes, wait, and raise the first failure. Leaves no state in this process."""
    _refuse_if_started()
    check_backend(os.environ.get("DRIVETRAIN_DISTRIBUTED_TYPE") or None, plan.world_size)
    added = {**variables, LAUNCHER: "drivetrain", "ROLE_NAME": OutputConfig().role, worker.PARENT: str(os.getpid())}
    if not os.environ.get("OMP_NUM_THREADS"):
        added["OMP_NUM_THREADS"] = str(max(1, available_cores() // plan.processes_here))
    # Notebooks differ from machine to machine in what was typed; the name that the user gave to the run does not.
    run_id = str(variables.get("TORCHELASTIC_RUN_ID", ""))
    rendezvous = make_rendezvous(plan, RunIdentity(run_id, bool(run_id), token=os.environ.get(TOKEN, "")))
    words: list[str] = []
    ending = run_workers(_start_function(function, args), plan, rendezvous, added, words.append)
    if ending.error is not None:
        raise ending.error
    if ending.received == signal.SIGINT:
        raise KeyboardInterrupt
    if ending.received is not None or ending.how == "failed":
        raise LaunchError("".join(words).rstrip())


def _patience(rdzv_backend: str, rdzv_conf: dict[str, Any]) -> RendezvousConfig:
    """Return the rendezvous timeouts from the options of torch's rendezvous."""
    if rdzv_backend not in ("c10d", "static"):
        raise UsageError(f"rdzv_backend is {rdzv_backend!r}", cure="Write 'c10d' or 'static'.")
    ours = {"timeout": "timeout_seconds", "join_timeout": "timeout_seconds", "last_call_timeout": "last_call_seconds"}
    unknown = sorted(set(rdzv_conf) - set(ours))
    if unknown:
        raise UsageError(f"rdzv_conf has no {', '.join(unknown)}", cure=f"It takes {', '.join(ours)}, in seconds.")
    return RendezvousConfig(**{ours[name]: seconds for name, seconds in rdzv_conf.items()})


class _Forked:
    """A forked process, as :class:`drivetrain.launch.workers.Process` describes it."""

    def __init__(self, process: ForkProcess) -> None:
        process.start()
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode


def _start_function(function: Callable[..., Any], args: Sequence[Any]) -> Start:
    """Workers that call a function in a fork of this process."""

    def start(_: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> _Forked:
        assert stdout is stderr is None, "functions write where their notebook does"
        return _Forked(multiprocessing.get_context("fork").Process(target=_work, args=(function, args, environment)))

    return start


def _work(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]) -> None:
    """Body of a forked process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):  # inherited handlers are the launcher's own
        number = getattr(signal, name)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    worker.follow_launcher()
    worker.leave_traces()
    sys.excepthook = worker.record_failure  # for a rank that is ended while it waits for one that is elsewhere
    try:
        function(*args)
    except SystemExit as error:
        worker.record_exit(error)
        raise
    except BaseException as error:  # noqa: BLE001 - recorded for the launching process, which raises it
        worker.record_failure(type(error), error, error.__traceback__)
        sys.exit(1)


def _refuse_if_started() -> None:
    """Refuse to fork a process that already holds what a forked one cannot use."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise LaunchError(
            "this process is already part of a distributed job, so that no other can be forked from it",
            cure="Create the Accelerator inside the function that you launch, and restart the notebook.",
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "CUDA has been used in this process, and a forked process cannot use it again",
            cure="Move everything that touches a device into the function that you launch, and restart the notebook.",
        )
