"""Starts, monitors, restarts and stops the workers of this node."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

from drivetrain.config.schema import OutputConfig
from drivetrain.errors import LaunchError
from drivetrain.launch.coordinator import Departure, Rendezvous, Round
from drivetrain.launch.failures import (
    Failure,
    LastSeen,
    explain,
    file_report,
    read_failures,
    read_workers,
    where_they_were,
)
from drivetrain.launch.output import Output, restore_terminal
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.worker import EXIT_RESUMABLE, SIGNALS

STOP_SECONDS = 30.0
"""Time for workers to end after a signal before they are killed, as under ``torchrun``."""

INTERRUPT_SECONDS = 10.0
"""The same after Ctrl-C, when a user is waiting. A worker in a collective does not handle the signal."""

_log = logging.getLogger(__name__)
_OTHER_SIGNALS = [getattr(signal, name) for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
"""Signals that stop the workers at once, unless whoever started the launcher has it ignore them, as ``nohup`` does."""

_NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""A collective that fails ends its process, as under torchrun, unless the user says otherwise."""

_SENT = (-signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of workers that were stopped, where they had not ended before."""

_LOCAL_RANK = "${local_rank}"
"""In an argument it becomes the worker's local rank, as under ``torchrun``."""


class Process(Protocol):
    """Protocol of a worker's process, as :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its id, which is also that of its session and process group."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises :class:`subprocess.TimeoutExpired`."""


Start = Callable[[int, Mapping[str, str], int | None, int | None], Process]
"""Starts a worker with this local rank, environment, stdout and stderr, in a session of its own.

The streams are file descriptors, ``subprocess.DEVNULL``, or ``None`` for the launcher's own. In a session of its own a
worker does not get a terminal's Ctrl-C, which is the launcher's to pass on.
"""


def start_command(command: Sequence[str]) -> Start:
    """Workers that run a program with its arguments."""

    def start(local_rank: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> Process:
        words = [word.replace(_LOCAL_RANK, str(local_rank)) for word in command]
        return subprocess.Popen(words, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)

    return start


class StopRequestedError(Exception):
    """Raised in the main thread, wherever it is, when a signal says that the workers have to be stopped."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received)
        self.received = received
        self.running: list[int] = []
        """Global ranks that had not ended by then."""


class StopSignals:
    """Handles Ctrl-C and SIGTERM while workers run; a context manager. Does nothing outside of the main thread.

    The first signal is passed on to the workers if all of them have announced that they save themselves; else
    :class:`StopRequestedError` is raised, and all are stopped. A second Ctrl-C kills all of them at once.

    Args:
        output: has the folder of the workers' records.
        num_workers: on this node.
    """

    def __init__(self, output: Output, num_workers: int) -> None:
        self._output, self._num_workers = output, num_workers
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}
        self._timer: threading.Timer | None = None
        self._held: list[int] | None = None
        self._received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in _OTHER_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in (*SIGNALS, *heeded)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals that arrive inside of the block are handled at its end."""
        self._held = []
        try:
            yield
        finally:
            arrived, self._held = self._held, None
        for number in arrived:
            self._on_signal(number, None)

    def exit_code(self) -> int:
        """After all workers ended well: 0, or the code with which they stopped on request."""
        return max((seen.stop for seen in self._seen() if seen.stop > 1), default=0)

    def was_starting(self, received: int | None) -> bool:
        """Whether a run stopped by this signal was still starting and so can be resumed from its last checkpoint.

        A worker is starting until it has made its accelerator, and no step can have been trained before all have.
        """
        seen = self._seen()
        is_starting = len(seen) < self._num_workers or any(not (each.calls or each.stop) for each in seen)
        return received == signal.SIGTERM and is_starting

    def kill_leftovers(self) -> None:
        """Kill remaining workers and the processes that they started."""
        for seen in self._seen():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(seen.pid, signal.SIGKILL)

    def _seen(self) -> list[LastSeen]:
        return list(read_workers(self._output.records).values())

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._held is not None:
            self._held.append(signum)
            return
        sent = signal.Signals(signum)
        again = self._received is not None
        self._received = self._received or sent
        if again and sent != signal.SIGINT:
            return  # schedulers and terminals repeat signals, and schedulers finally send SIGKILL
        if sent not in SIGNALS:
            raise StopRequestedError(sent)
        if again:
            self.kill_leftovers()
            if self._timer is not None:
                return  # the main thread is waiting for them to end
        elif self._workers_save():
            sys.stderr.write(f"{sent.name}: the run saves itself after this step; Ctrl-C stops it at once\n")
            for seen in self._seen():
                # To the worker only: the signal would end its loaders' processes.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen.pid, signum)
            return
        self._timer = threading.Timer(INTERRUPT_SECONDS, self.kill_leftovers)
        self._timer.daemon = True
        if sent == signal.SIGINT:
            self._timer.start()
        raise StopRequestedError(self._received)

    def _workers_save(self) -> bool:
        seen = self._seen()
        return len(seen) == self._num_workers and all(each.stop for each in seen)


@dataclass(frozen=True)
class Ending:
    """Result of the workers of this node.

    Args:
        code: for the shell.
        how, why: reported to the other nodes.
        error: the launcher's own, to be raised.
        received: the signal at which the workers were stopped.
        out_of_memory: a worker ended because its device had no memory left.
    """

    code: int
    how: Departure = "finished"
    why: str = ""
    error: Exception | None = None
    received: signal.Signals | None = None
    out_of_memory: bool = False


def run_workers(
    start: Start,
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    variables: Mapping[str, str],
    say: Callable[[str], object],
    *,
    output: OutputConfig | None = None,
    saves: bool = False,
    project_dir: str | None = None,
) -> Ending:
    """Run workers until no further round begins, and leave the rendezvous. None of them is left then.

    Args:
        start: starts one worker.
        plan: how many there are, and how often they are looked at.
        rendezvous: when to start, with which ranks.
        variables: added to this process's environment for every worker.
        say: told, in lines, how the workers ended, before this node waits for the others.
        output: what becomes of what workers write; ``None`` = they write where the launcher does.
        saves: the run saves itself when it is asked to end.
        project_dir: gets the file with the whole report of a failure.

    Raises:
        LaunchError: the workers of this node finished, but the job failed on another one.
    """
    with (
        tempfile.TemporaryDirectory(prefix="drivetrain-") as folder,
        contextlib.closing(Output(output, Path(folder))) as streams,
        StopSignals(streams, plan.processes_here) as signals,
    ):
        running: list[int] = []
        try:
            failures = _run_rounds(start, plan, streams, signals, rendezvous, variables)
            ending = Ending(signals.exit_code())
        except LaunchError as error:
            streams.close()
            say(where_they_were(streams.records))
            failures, ending = [], Ending(1, "stopped", error=error)
        except OSError as error:
            failures, ending = [], Ending(1, "failed", f"its launcher failed: {error}", error)
        except StopRequestedError as stop:
            signals.kill_leftovers()
            running = stop.running
            why = f"was stopped by {stop.received.name}"
            failures, ending = [], Ending(128 + stop.received, "interrupted", why, received=stop.received)
        if failures or ending.received is not None:
            restore_terminal()
        if failures:
            starved = any(each.out_of_memory for each in failures)
            ending = Ending(failures[0].shell_code, "failed", _first(failures), out_of_memory=starved)
        # A scheduler that signals every process may reach the workers before this one.
        received = -(failures[0].exit_code or 0) if failures else ending.received
        if saves and signals.was_starting(received):
            signals.kill_leftovers()
            why = "was stopped by SIGTERM before the training began"
            say(f"{why.removeprefix('was ')}; started again, it goes on from its checkpoint\n")
            ending = Ending(EXIT_RESUMABLE, "interrupted", why)
        elif failures:
            say(_report(failures, streams))
            say(file_report(failures, project_dir))
        elif ending.received is not None:
            streams.close()
            say(where_they_were(streams.records, running))
            say(f"stopped by {ending.received.name}; no worker is left\n")
        elif ending.how == "finished" and ending.code:
            say("the run saved itself and stopped; started again, a script that loads its newest checkpoint goes on\n")
            ending = Ending(ending.code, "interrupted", "saved itself and stopped")
    others = rendezvous.leave(ending.how, ending.why)
    for sentence in others:
        if sentence not in str(ending.error):
            say(f"{sentence}\n")
    return ending


def _run_rounds(
    start: Start,
    plan: LaunchPlan,
    output: Output,
    signals: StopSignals,
    rendezvous: Rendezvous,
    variables: Mapping[str, str],
) -> list[Failure]:
    """Start the workers in each round, and wait until all have ended well or no further round begins.

    Args:
        start, plan, rendezvous, variables: as for :func:`run_workers`.
        output: what becomes of what they write.
        signals: entered.

    Returns:
        Failures of workers in the last round, the cause of the others first; empty when all ended well.

    Raises:
        LaunchError: the rendezvous failed, a port is taken, or the job is over for all nodes.
        StopRequestedError: as ``signals`` says; the workers have been stopped by the same signal.
        OSError: the command cannot be started.
    """
    restart_count: int | None = None
    # By this scripts and torch recognise a launched worker: torch.distributed.is_torchelastic_launched().
    job = {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    while True:
        current = rendezvous.next_round()
        if restart_count is not None:
            why = "since machines came or went"
            if current.restart_count != restart_count:
                why = f"restart {current.restart_count} of {plan.max_restarts}"
            sys.stderr.write(f"the workers are started again: {why}\n")
        restart_count = current.restart_count
        first_rank = current.node_rank * plan.processes_here
        workers: list[Process] = []
        inherited = {_NCCL: "1", **os.environ, **job, **variables, **current.variables}
        environments = [inherited | rank_environment(current, plan, rank) for rank in range(plan.processes_here)]
        try:
            with signals.held():  # a process that is being started has to be known before it can be stopped
                for local_rank, streams in enumerate(output.open(first_rank, len(environments))):
                    workers.append(_start(start, local_rank, environments[local_rank], *streams))
            if current.store is not None:
                current.store.serve()
            codes = _watch(workers, current, rendezvous, plan.monitor_interval)
        except StopRequestedError as requested:
            requested.running = [first_rank + rank for rank, worker in enumerate(workers) if worker.poll() is None]
            _stop(workers, requested.received)
            raise
        finally:
            _stop(workers)
            if current.store is not None:
                current.store.close()
        if codes is not None:
            if not codes:
                return []
            failures = read_failures({first_rank + rank: code for rank, code in codes.items()}, output.records)
            if not rendezvous.may_restart(_first(failures)):
                return failures
            sys.stderr.write(_report(failures, output))
        output.close()


def _start(
    start: Start, local_rank: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None, record: str
) -> Process:
    """Start one worker, which records an exception in this file."""
    try:
        return start(local_rank, {**environment, "TORCHELASTIC_ERROR_FILE": record}, stdout, stderr)
    finally:
        # The worker has its own copy; ours would keep a pipe from ending.
        for descriptor in (stdout, stderr):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _watch(
    workers: Sequence[Process], current: Round, rendezvous: Rendezvous, interval: float
) -> dict[int, int | None] | None:
    """Wait until all workers have ended well; stop all when one fails or another round has to begin.

    Returns:
        Exit codes by local rank of workers that did not end well, ``None`` for those that were stopped for the sake of
        the others. Instead of them ``None`` when another round has to begin.
    """
    while True:
        time.sleep(interval)
        if current.store is not None:
            current.store.check()
        codes = [worker.poll() for worker in workers]
        if any(codes):
            _log.info("exit codes by local rank: %s; the others are stopped", codes)
            _stop(workers)
            last = enumerate(worker.poll() for worker in workers)
            ended = {rank: None if code in _SENT else code for rank, code in last if code != 0}
            return ended | {rank: code for rank, code in enumerate(codes) if code}
        if None not in codes:
            return {}
        if rendezvous.must_restart():
            return None


def _stop(workers: Sequence[Process], sent: signal.Signals = signal.SIGTERM) -> None:
    """Terminate running workers and the processes that they started; kill those that ignore it. May be repeated.

    A process that waits inside the kernel, for a device for instance, cannot be killed; it is waited for as long again
    and then left.
    """
    for attempt in (sent, signal.SIGKILL):
        running = [worker for worker in workers if worker.poll() is None]
        for worker in running:
            _log.info("process %s is sent %s", worker.pid, attempt.name)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, attempt)
                os.killpg(worker.pid, signal.SIGCONT)  # a stopped process handles no signal until it continues
        end = time.monotonic() + STOP_SECONDS
        for worker in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, end - time.monotonic()))


def rank_environment(current: Round, plan: LaunchPlan, local_rank: int) -> dict[str, str]:
    """Environment variables, under torchrun's names, with a worker's ranks and the address of the store."""
    here = plan.processes_here
    rank, world_size = current.node_rank * here + local_rank, current.num_nodes * here
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "ROLE_RANK": rank, "GROUP_RANK": current.node_rank}
    numbers |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": here, "ROLE_WORLD_SIZE": world_size}
    numbers |= {"GROUP_WORLD_SIZE": current.num_nodes, "MASTER_PORT": current.master_port}
    numbers |= {"TORCHELASTIC_RESTART_COUNT": current.restart_count, "TORCHELASTIC_MAX_RESTARTS": plan.max_restarts}
    words = {"MASTER_ADDR": current.master_addr, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in numbers.items()} | words


def _first(failures: Sequence[Failure]) -> str:
    """``rank 1 failed: ...``, for other nodes to read."""
    return f"rank {failures[0].rank} failed: {failures[0]}"


def _report(failures: list[Failure], output: Output) -> str:
    """The report of failures: the end of the first failed rank's output if it was not shown, and all ranks."""
    output.close()  # so that the report comes after all output of the workers
    return f"{output.last_words(failures[0].rank)}{explain(failures)}\n"
