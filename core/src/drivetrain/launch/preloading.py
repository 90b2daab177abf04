"""Loads torch's libraries in a thread, while the command line still reads its configuration. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from pathlib import Path

# In the order and with the visibility with which torch loads them itself.
_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))


def preload_torch() -> None:
    """Start to load what ``import torch`` will want, on another core: linking takes a fifth of that import.

    Python cannot end before the thread has, which is a fraction of a second. Does nothing but on Linux.
    """
    if "torch" not in sys.modules and sys.platform == "linux":
        threading.Thread(target=_load, name="drivetrain-preload").start()


def _load() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    with contextlib.suppress(OSError):  # whatever is missing, `import torch` finds it or says what it misses
        for name, mode in _LIBRARIES:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)
