"""Runs the user's script in a worker process and records its failure for the launcher.

The launcher starts ``python worker.py [-m] script args``. The script is executed as ``__main__`` just as ``python``
would: same ``sys.argv``, same ``sys.path[0]``, and an exception ends the process with code 1. But the traceback goes
into the file that torchrun names, too (``TORCHELASTIC_ERROR_FILE``), instead of the terminal, where those of
the other ranks, which fail as soon as their peer is gone, would bury it. This file imports nothing but the standard
library, and nothing of Drivetrain: it runs before the script's own environment is known to be sound.
"""

from __future__ import annotations

import _thread
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

PARENT = "DRIVETRAIN_INTERNAL_LAUNCHER_PID"
"""Process id of the launcher; a worker that outlives it would hold devices and write into the next run's folders."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals after which a run may save itself before it ends."""

EXIT_RESUMABLE = 75
"""Exit code of a run that saved a checkpoint on a signal and ended: EX_TEMPFAIL of sysexits.h, "try again later"."""

LAST_CALL, CALL_SITES, STACKS = "last_call", "call_sites", "stacks"
"""Files beside the record: numbers of 8 bytes (below), one line of text for each site, and a dump for each signal."""

PID, RANK, CALLS, SITE, STOP = range(5)
"""Indices of ``last_call``: process id, global rank, number of Drivetrain calls of the script, index of the last one's
line in ``call_sites`` plus 1, and the effect of a request to stop.

That is 0 if the process ends at once, 1 if it saves first; later the exit code with which it stopped on a request.
"""

_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_OUR_ERRORS = ("drivetrain.errors", "DrivetrainError")
"""Module and name of the base of this library's errors, which this file does not import."""

_LONGEST = 10_000_000
"""Characters of a message or a traceback that the launcher is handed; the record must not fill the disk."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def run(arguments: list[str]) -> None:
    """Execute a script, folder or ``-m module`` as the main program, with the remaining arguments as its own."""
    follow_launcher()
    leave_traces()
    sys.excepthook = record_failure
    try:
        _execute(arguments)
    except SystemExit as error:
        record_exit(error)
        raise


def _execute(arguments: list[str]) -> None:
    as_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if as_module else arguments
    target = sys.argv[0]
    if as_module:
        _set_first_path(str(Path.cwd()))
        code, module = _load_module(target)
        sys.argv[0] = module.__file__ or target
    elif target.endswith((".py", ".pyw")) and Path(target).is_file():
        _set_first_path(str(Path(target).resolve().parent))
        code, module = _load_script(target)
    else:  # a folder or archive with a __main__.py, or something else that only runpy knows
        _set_first_path(target)
        runpy.run_path(target, run_name="__main__")
        return
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - running the user's program is what this file is for


def record_exit(error: SystemExit) -> None:
    """Record for the launcher that the script ended this process, unless it ended it well."""
    if error.code:
        _write_record(f"SystemExit: {error.code}", "", error.code if isinstance(error.code, int) else 1)


def record_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught exception for the launcher; print it when there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen runpy")):
        trace = trace.tb_next
    error.__traceback__ = trace
    if issubclass(kind, KeyboardInterrupt):
        _write_record("", "", -signal.SIGINT)  # nothing is printed: the user pressed Ctrl-C and knows
        return
    ours = any((each.__module__, each.__name__) == _OUR_ERRORS for each in kind.__mro__)
    text = "".join(traceback.format_exception(kind, error, trace))
    shown = of_the_script(kind, error, trace) if ours and not _debugs() else text
    chained = ours and _is_of_the_script(error)
    said = traceback.TracebackException(kind, error, None)
    said.__notes__ = None  # these would stand last; the traceback has them
    message = list(said.format_exception_only())[-1].strip()
    out_of_memory = _is_out_of_memory(error)
    if not _write_record(message, text, 1, out_of_memory=out_of_memory, ours=shown if ours else "", chained=chained):
        sys.__excepthook__(kind, error, trace)


def of_the_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback of an error of ours up to the line of the script that called us, and what it says."""
    return "".join(traceback.format_exception(kind, error, _without_ours(trace), chain=_is_of_the_script(error)))


def _debugs() -> bool:
    """Whether the launcher's configuration says ``debug: true``, which shows inner frames of our errors too."""
    try:
        return json.loads(os.environ.get("DRIVETRAIN_CONFIG") or "{}").get("values", {}).get("debug") is True
    except (ValueError, AttributeError):  # another program's variable; the failure at hand is what counts
        return False


def _is_of_the_script(error: BaseException) -> bool:
    """Whether an error was raised from one of the script's own code, such as a hook, whose lines are then shown.

    Or while that one ended the script, as by a call of ours in its ``finally``.
    """
    libraries = (_PACKAGE, "<frozen", str(Path(os.__file__).parent))
    cause = error.__cause__ if error.__suppress_context__ else error.__context__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    files = [frame.filename for frame in frames if "site-packages" not in frame.filename]
    return any(not file.startswith(libraries) and "/src/drivetrain_" not in file for file in files)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Cut a traceback after the script's line that called this library; its own frames do not help the user."""
    last, each = None, trace
    while each is not None and not each.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        # The import system's frames lie between an import of ours and the library.
        last, each = last if each.tb_frame.f_code.co_filename.startswith("<frozen") else each, each.tb_next
    if last is not None and each is not None:
        last.tb_next = None
    return trace


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left: torch's error of that type, or one that was raised from it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None


def _write_record(
    message: str, text: str, exit_code: int, *, out_of_memory: bool = False, ours: str = "", chained: bool = False
) -> bool:
    """Write the error file in the format of torch's elastic agent. ``False`` when there is none.

    The exit code, as :mod:`subprocess` counts, is for a process that is stopped on its way out.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time()
    details = {
        "py_callstack": _cut(text),
        "timestamp": str(int(now)),
        "precise": repr(now),
        "rank": os.environ.get("RANK", "0"),
        "exit_code": exit_code,
        "out_of_memory": out_of_memory,
        "ours": _cut(ours),
        "chained": chained,
    }
    try:
        part = Path(path + ".part")  # it must appear whole
        part.write_text(json.dumps({"message": {"message": _cut(message), "extraInfo": details}}), encoding="utf-8")
        part.replace(path)
    except OSError:
        return False
    return True


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def leave_traces() -> None:
    """Open the files from which the launcher finds out what this process was doing when it ended.

    A signal that ends the process, Ctrl-C's too, makes ``faulthandler`` write every thread's stack, also while the main
    thread waits in a collective, where Python code could not run. What survives SIGKILL is only the record of the last
    call, which :mod:`drivetrain.distributed.watchdog` keeps in a mapped file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or sys.platform == "win32":
        return
    try:
        Path(path).with_name(LAST_CALL).write_bytes(struct.pack("5Q", os.getpid(), int(os.environ["RANK"]), 0, 0, 0))
        Path(path).with_name(STACKS).write_text(f"{_thread.get_ident():#x}\n", encoding="utf-8")
    except OSError:  # a full disk must not prevent training
        return
    _dump_stacks_into(Path(path).with_name(STACKS))
    # A loader's worker is stopped by the same signal, and its stack is not the rank's.
    os.register_at_fork(after_in_child=_dump_no_stacks)


def handle_signals(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Call ``signal.signal`` for each, but keep writing stacks first. Returns the previous handlers.

    A plain new handler would replace the one that writes them.
    """
    writes = sys.platform != "win32" and _dump_no_stacks()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    if writes:
        _dump_stacks_into(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(STACKS))
    return before


def _dump_stacks_into(path: Path) -> None:
    """Write the stacks of all threads to this file on SIGINT, SIGTERM or a crash."""
    stacks = path.open("a", encoding="utf-8")  # open as long as the process lives
    for number in SIGNALS:
        faulthandler.register(number, stacks, chain=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(stacks)


def _dump_no_stacks() -> bool:
    """Write none on a signal any more; returns whether any were written before."""
    return any([faulthandler.unregister(number) for number in SIGNALS])  # type: ignore[func-returns-value] # noqa: C419


def follow_launcher() -> None:
    """End this process when the launcher is killed (Linux only)."""
    parent = os.environ.pop(PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died between our start and the line above
        sys.exit(1)


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return code, module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        sys.exit(f"{sys.executable}: no module named {name} that could be run")
    code = spec.loader.get_code(spec.name)
    assert code is not None
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__spec__, module.__package__ = (
        spec.origin,
        spec.loader,
        spec,
        spec.parent,
    )
    return code, module


def _set_first_path(folder: str) -> None:
    """Replace this file's folder in ``sys.path[0]``, unless Python was started with safe-path mode."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


if __name__ == "__main__":
    run(sys.argv[1:])
