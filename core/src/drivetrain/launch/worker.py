"""Runs the user's script in a worker so that its failure reaches the launcher as one traceback.

The launcher starts ``python worker.py [-m] script args``. The script is executed as ``__main__`` just as ``python``
would: same ``sys.argv``, same ``sys.path[0]``, and an exception ends the process with code 1. But the traceback goes
into the file that torch's elastic agent reads (``TORCHELASTIC_ERROR_FILE``) instead of the terminal, where those of
the other ranks, which fail as soon as their peer is gone, would bury it. This file imports nothing but the standard
library, and nothing of Drivetrain: it runs before the script's own environment is known to be sound.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

PARENT = "DRIVETRAIN_INTERNAL_LAUNCHER_PID"
"""Process id of the launcher; a worker that outlives it would hold devices and write into the next run's folders."""

_HERE = str(Path(__file__).parent)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SIGTERM = 15


def run(arguments: list[str]) -> None:
    """Execute a script, folder or ``-m module`` as the main program, with the remaining arguments as its own."""
    follow_launcher()
    sys.excepthook = record_failure
    try:
        _execute(arguments)
    except SystemExit as error:
        if error.code:
            _write_record(f"SystemExit: {error.code}", "")
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


def record_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Hand an uncaught exception to the launcher; print it here when nobody would read it there."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen runpy")):
        trace = trace.tb_next
    error.__traceback__ = trace
    if issubclass(kind, KeyboardInterrupt):
        return  # the user pressed Ctrl-C and knows
    text = "".join(traceback.format_exception(kind, error, trace))
    if not _write_record(traceback.format_exception_only(kind, error)[-1].strip(), text):
        sys.__excepthook__(kind, error, trace)


def _write_record(message: str, text: str) -> bool:
    """Write what happened into the agent's file, in the agent's format. ``False``: there is nobody to read it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{word}", "0")) for word in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not path or restarts < limit:  # the agent reads the file only when it gives up
        return False
    now = time.time()
    details = {
        "py_callstack": text,
        "timestamp": str(int(now)),
        "precise": repr(now),
        "rank": os.environ.get("RANK", "0"),
    }
    try:
        part = Path(path + ".part")  # the agent must never read half of it
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")
        part.replace(path)
    except OSError:
        return False
    return True


def follow_launcher() -> None:
    """End this process when the launcher dies without having said so (Linux; elsewhere there is no such means)."""
    parent = os.environ.pop(PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, _SIGTERM, 0, 0, 0)
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
    """Put a folder where python put this file's own, unless python was told to put nothing there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


if __name__ == "__main__":
    run(sys.argv[1:])
