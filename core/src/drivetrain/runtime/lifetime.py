"""The end of a run: engines are let go before their process group, whether the script ends well or not."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType
from weakref import WeakMethod


def at_exit(close: Callable[[], None]) -> None:
    """Call a bound method when the interpreter ends, if its object is still alive then."""
    method = WeakMethod(close)

    def run() -> None:
        alive = method()
        if alive is not None:
            alive()

    atexit.register(run)


def on_failure(report: Callable[[BaseException], None]) -> None:
    """Call a bound method with the exception that ends the script, before the traceback is printed."""
    method = WeakMethod(report)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alive = method()
        if alive is not None:
            alive(error)
        previous(kind, error, trace)

    sys.excepthook = hook
