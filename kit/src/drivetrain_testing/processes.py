"""Runs a function as the ranks of a distributed job: fresh processes, forked from a preloaded server, over gloo.

Every call makes new processes, so no test can spoil the next, and still costs a tenth of a second. The first call
starts the fork server and pays for its imports (about two seconds).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.errors import DrivetrainError, UsageError
from drivetrain_testing import worker

T = TypeVar("T")

_LOG_LINES = 60
_DUMP_SECONDS = 5.0
_EXTRA_MODULES: list[str] = []
_SERVER_STARTED = False


class RankFailedError(DrivetrainError, AssertionError):
    """A rank raised, or died without a word.

    Attributes:
        rank: which one failed first.
        traceback: its formatted traceback; for one that died, the end of what it had printed.
        cause: the exception itself where it could be pickled, else ``None``.
    """

    rank: int = -1
    traceback: str = ""
    cause: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.what}\n{self.traceback}".rstrip()


class RankTimeoutError(RankFailedError, TimeoutError):
    """A job did not end in time; ``traceback`` holds the stacks of every rank that was still running."""


def preload(*modules: str, opens_accelerators: bool = False) -> None:
    """Name further modules that the fork server shall import, such as an engine that is slow to import.

    Call it before the first :func:`spawn` of the process (in a ``conftest.py``); later it raises :class:`UsageError`.

    Args:
        modules: names of modules.
        opens_accelerators: their import may open an accelerator where there is one, as Megatron-Core's does. A forked
            process cannot use an accelerator that was opened before the fork, so there ranks import them themselves.
    """
    if _SERVER_STARTED:
        raise UsageError("the fork server has already started", cure="Call preload() in conftest.py.")
    if opens_accelerators:
        import torch

        if torch.accelerator.is_available():
            return
    _EXTRA_MODULES.extend(modules)


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` once in each of ``world_size`` fresh processes and return the results by rank.

    The environment is that of a launcher (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ...), so that
    ``Accelerator()`` and ``torch.distributed.init_process_group("gloo")`` work; the store of the rendezvous lives in
    this process on a port of its own. One process is forked too when ``world_size`` is 1. All ranks start with the same
    state of the random number generators, and with one thread.

    Args:
        fn: a module-level function (or static method); in the ranks it is found by module and name.
        world_size: number of ranks, at least 1.
        args: positional arguments; picklable.
        timeout: seconds until the whole job is ended.
        env: additions to this process's environment; ``None`` as a value removes the variable.
        kwargs: keyword arguments; picklable.

    Returns:
        The picklable return value of each rank.

    Raises:
        RankFailedError: a rank raised or died; the first failure ends the other ranks at once.
        RankTimeoutError: the job did not end in time.
        UsageError: ``fn`` cannot be found by name.
    """
    __tracebackhide__ = True
    if "<" in fn.__qualname__ or world_size < 1:
        raise UsageError(
            f"spawn cannot run {fn.__qualname__} on {world_size} ranks",
            cure="Give it a function at the top level of a module, and at least 1 rank.",
        )
    with tempfile.TemporaryDirectory(prefix="drivetrain-spawn-") as folder, _store_server() as port:
        tasks = [
            worker.Task(
                module=fn.__module__,
                path=getattr(sys.modules.get(fn.__module__), "__file__", None),
                qualname=fn.__qualname__,
                arguments=pickle.dumps((args, kwargs)),
                environment=_environment(rank, world_size, port, env or {}),
                filters=pickle.dumps(list(warnings.filters)),
                log=str(Path(folder) / f"rank-{rank}.log"),
                deadline_seconds=timeout + 30,
            )
            for rank in range(world_size)
        ]
        try:
            with _job(tasks) as job:
                return _collect(job, timeout)
        finally:
            for task in tasks:
                sys.stdout.write(_read(task.log))


class _Job:
    """The processes of one spawn with their pipes and logs."""

    def __init__(self, tasks: Sequence[worker.Task]) -> None:
        self.name = f"{tasks[0].module}.{tasks[0].qualname}"
        self.logs = [task.log for task in tasks]
        self.processes: list[ForkServerProcess] = []
        self.pipes: list[connection.Connection] = []
        self.finished = False


@contextlib.contextmanager
def _store_server() -> Iterator[int]:
    """Serve a store on a free port, held by this process: no other can take it between choosing and using it.

    The store ends with the block. The traceback of a failed rank must not keep it: where it became garbage of a cycle,
    a forked process would collect it, and die, since the store's thread is not there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


@contextlib.contextmanager
def _job(tasks: Sequence[worker.Task]) -> Iterator[_Job]:
    """Start a process for each task; none of them, nor what they started, outlives the block."""
    context = _server()
    job = _Job(tasks)
    try:
        for task in tasks:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=worker.run, args=(task, sender))
            job.pipes.append(receiver)
            process.start()
            job.processes.append(process)
            sender.close()
        yield job
    finally:
        _end(job)
        for pipe in job.pipes:
            pipe.close()


def _server() -> multiprocessing.context.ForkServerContext:
    """The fork server's context; the first call starts the server, with one thread and this process's import path."""
    global _SERVER_STARTED  # noqa: PLW0603 - one server a process, as multiprocessing has it
    context = multiprocessing.get_context("forkserver")
    if not _SERVER_STARTED:
        context.set_forkserver_preload(["drivetrain_testing.preloaded"])
        setting = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "DRIVETRAIN_TESTING_PRELOAD": ",".join(_EXTRA_MODULES),
        }
        before = dict(os.environ)
        os.environ.update(setting)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
        _SERVER_STARTED = True
    return context


def _environment(rank: int, world_size: int, port: int, env: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables that torchrun sets on one machine, with the store in the agent, which this process is."""
    found: dict[str, str | None] = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "drivetrain-testing",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **env,
    }
    return {name: value for name, value in found.items() if value is not None}


def _collect(job: _Job, timeout: float) -> list[Any]:
    """Wait for every rank's outcome; the first failure ends the waiting."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(job.pipes):
        waiting = [rank for rank in range(len(job.pipes)) if rank not in values]
        ready = connection.wait([job.pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _late(job, waiting, timeout)
        failures: list[tuple[float, int, worker.Outcome]] = []
        for rank in waiting:
            if job.pipes[rank] not in ready:
                continue
            outcome = _receive(job, rank)
            if outcome.value is None:
                failures.append((outcome.when, rank, outcome))
            else:
                values[rank] = pickle.loads(outcome.value)  # noqa: S301 - written by our own child
        if failures:
            _, rank, outcome = min(failures, key=lambda failure: failure[:2])
            raise _failed(job, rank, outcome)
    return [values[rank] for rank in sorted(values)]


def _receive(job: _Job, rank: int) -> worker.Outcome:
    """A rank's report; for one that closed its pipe without a report, how it ended."""
    try:
        outcome = pickle.loads(job.pipes[rank].recv_bytes())  # noqa: S301 - written by our own child
    except EOFError:
        process = job.processes[rank]
        process.join(_DUMP_SECONDS)
        code = process.exitcode
        how = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        # Last in time: ranks that had a reason to fail reported it, and a death may be the consequence.
        return worker.Outcome(summary=f"died {how}, without an exception", when=float("inf"))
    assert isinstance(outcome, worker.Outcome)
    return outcome


def _failed(job: _Job, rank: int, outcome: worker.Outcome) -> RankFailedError:
    error = RankFailedError(f"rank {rank} of {len(job.pipes)} failed in {job.name}: {outcome.summary}")
    error.rank = rank
    error.traceback = outcome.traceback or _read(job.logs[rank], _LOG_LINES)
    error.cause = pickle.loads(outcome.error) if outcome.error is not None else None  # noqa: S301
    return error


def _late(job: _Job, waiting: Sequence[int], timeout: float) -> RankTimeoutError:
    """Make every late rank dump its stacks, and put them into the error."""
    lengths = {rank: len(_read(job.logs[rank])) for rank in waiting}
    for rank in waiting:
        _signal(job.processes[rank].pid, worker.DUMP_SIGNAL)
    deadline = time.monotonic() + _DUMP_SECONDS
    dumps = dict.fromkeys(waiting, "")
    while time.monotonic() < deadline and not all("most recent call first" in dump for dump in dumps.values()):
        time.sleep(0.02)
        dumps = {rank: _read(job.logs[rank])[lengths[rank] :] for rank in waiting}
    late = ", ".join(map(str, waiting))
    error = RankTimeoutError(f"{job.name}: rank {late} of {len(job.pipes)} not done after {timeout:g} s")
    error.rank = waiting[0]
    error.traceback = "\n".join(f"rank {rank}:\n{dump}" for rank, dump in dumps.items())
    return error


def _end(job: _Job) -> None:
    """End every rank and what it has started. May be called twice."""
    for process in job.processes:
        if process.exitcode is None and not job.finished:
            _signal(process.pid, signal.SIGKILL)
    for process in job.processes:
        process.join()
    if not job.finished:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):  # nothing of the rank's group is left, as it should be
                os.killpg(process.pid or 0, signal.SIGKILL)
    job.finished = True


def _signal(pid: int | None, number: int) -> None:
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in the meantime
        os.kill(pid, number)


def _read(log: str, lines: int | None = None) -> str:
    """The log's text, or its last lines; empty when the rank wrote nothing."""
    path = Path(log)
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if lines is None else "\n".join(text.splitlines()[-lines:])
