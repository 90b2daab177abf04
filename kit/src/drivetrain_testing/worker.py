"""Runs one rank of :func:`drivetrain_testing.spawn` inside the forked process."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import ModuleType

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads to its log."""

KEPT_SECONDS = 2.0
"""Time for which a destroyed process group is kept alive; see :func:`_keep_destroyed_groups`."""


@dataclass(frozen=True)
class Task:
    """Task of a rank; sent between processes unchanged.

    Args:
        module: name of the module that holds the function.
        path: file of that module, ``None`` when it has none.
        qualname: name of the function inside of the module, dotted for a static method.
        arguments: pickled ``(args, kwargs)``; unpickled after the module exists here, which may define their classes.
        environment: the rank's whole environment.
        filters: pickled ``warnings.filters`` of the test, so that "warnings are errors" holds in ranks too.
        log: file that takes the rank's standard output and error.
        deadline_seconds: after this time the rank ends itself, if its parent has not ended it.
    """

    module: str
    path: str | None
    qualname: str
    arguments: bytes
    environment: Mapping[str, str]
    filters: bytes
    log: str
    deadline_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Report of a rank.

    Args:
        value: pickled return value, ``None`` when it failed.
        error: pickled exception where it can be pickled.
        summary: ``"ValueError: ..."``, empty when it succeeded.
        traceback: formatted traceback, empty when it succeeded.
        when: time of the report on the machine's monotonic clock: the first failure is the one that matters.
    """

    value: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    traceback: str = ""
    when: float = 0.0


def run(task: Task, report: Connection) -> None:
    """Be a rank: run the task, report one pickled :class:`Outcome`, end the process without Python's finalisation.

    gloo's threads may outlive the process group and take the interpreter lock while it is being finalised, which aborts
    the process; ``os._exit`` avoids that.
    """
    os.setpgid(0, 0)  # so that whatever the rank starts (loader workers) can be ended together with it
    _redirect(task.log)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)
    faulthandler.dump_traceback_later(task.deadline_seconds, exit=True)
    _keep_destroyed_groups()
    # Not this process's own method, the fork server's: a loader's workers start as they do under a launcher.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # Called by a thread that ends the rank while its main thread waits for others.
    sys.excepthook = lambda _kind, error, _trace: _end(_failed(error), report)
    _end(_outcome(task), report)


def _end(outcome: Outcome, report: Connection) -> NoReturn:
    report.send_bytes(pickle.dumps(outcome))
    report.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome.value is not None else 1)


def _keep_destroyed_groups() -> None:
    """Let the process groups of this rank live on after they are destroyed, for :data:`KEPT_SECONDS` or to its end.

    The destructor of a gloo group waits for the group's threads and holds the interpreter lock meanwhile, and a thread
    that has just ended a collective takes that lock to release Python objects. Whoever drops the last reference then
    hangs: the destruction itself, or a wrapped model that outlives it (DDP on two ranks: about every third run).
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group
    kept: deque[tuple[float, list[Any]]] = deque()

    @functools.wraps(destroy)
    def keeping(group: Any = None) -> None:
        now = time.monotonic()
        while kept and now - kept[0][0] > KEPT_SECONDS:
            kept.popleft()
        kept.append((now, list(distributed_c10d._world.pg_map)))  # noqa: SLF001 - no public list of them
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = keeping


def _redirect(log: str) -> None:
    """Send file descriptors 1 and 2 to the log, engines' own messages included."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115 - lives as long as the rank
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115


def _outcome(task: Task) -> Outcome:
    try:
        os.environ.clear()
        os.environ.update(task.environment)
        function = _find(task)
        filters = cast("list[Any]", warnings.filters)  # a list, whatever its stub says
        filters[:] = pickle.loads(task.filters)  # noqa: S301 - written by our own parent process
        args, kwargs = pickle.loads(task.arguments)  # noqa: S301
        return Outcome(value=pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes are failures of this rank too
        return _failed(error)


def _failed(error: BaseException) -> Outcome:
    pickled = None
    with contextlib.suppress(Exception):  # an error that cannot travel is still told by its traceback
        candidate = pickle.dumps(error)
        pickle.loads(candidate)  # noqa: S301 - many exceptions can be pickled but not unpickled
        pickled = candidate
    summary = traceback.format_exception_only(error)[-1].strip()
    told = "".join(traceback.format_exception(error))
    return Outcome(error=pickled, summary=summary, traceback=told, when=time.monotonic())


def _find(task: Task) -> Callable[..., Any]:
    found: Any = _module(task)
    for name in task.qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _module(task: Task) -> ModuleType:
    """The module that holds the function: imported by name where that leads to the same file, else from the file.

    Test modules are often not importable by name (``--import-mode=importlib``).
    """
    if task.module in sys.modules:
        return sys.modules[task.module]
    if task.path is None or _origin(task.module) == task.path:
        return importlib.import_module(task.module)
    spec = importlib.util.spec_from_file_location(task.module, task.path)
    assert spec is not None, task.path
    assert spec.loader is not None, task.path
    module = importlib.util.module_from_spec(spec)
    sys.modules[task.module] = module
    spec.loader.exec_module(module)
    return module


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that does not exist, or a module without a spec
        return None
    return spec.origin if spec is not None else None
