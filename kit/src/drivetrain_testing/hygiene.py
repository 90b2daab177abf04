"""Detects leaks of a test: environment variables, a process group, torch's global settings, threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Written by pytest and by torch's own first use of an engine, never by us; the value says who.
FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest",
    "PYTEST_VERSION": "pytest",
    "KMP_INIT_AT_FORK": "torch, on importing its compiler",
    "KMP_DUPLICATE_LIB_OK": "torch, on importing its compiler",
    "TORCHINDUCTOR_CACHE_DIR": "torch, on using its compiler",
    "PJRT_DEVICE": "torch_xla, on being told its device, which a process keeps",
    "SKIP_MEGASCALE_PJRT_CLIENT": "XLA, on starting its client",
    "XLA_USE_SPMD": "torch_xla, on making one mesh of all devices, which a process keeps",
}

# Before torch.distributed is imported nobody can have formed a group.
_NO_GROUP = {"default process group": False}


class Snapshot:
    """The state of this process's globals; compares itself with the state at a later time and can bring it back.

    Torch's settings are looked at only when torch is imported already: looking must not import it.
    """

    def __init__(self) -> None:
        self.environment = own_environment()
        self.folder = Path.cwd()
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.handlers = _handlers()
        self.settings = {name: read() for name, (read, _) in _settings().items()}

    def differences(self, *, daemons: bool = False) -> list[str]:
        """One sentence for each thing that is no longer as it was.

        Args:
            daemons: threads that do not keep the process alive count too.
        """
        found = [
            f"environment variable {name}: {before!r} became {after!r}"
            for name, before, after in _changes(self.environment, own_environment())
        ]
        if Path.cwd() != self.folder:
            found.append(f"current folder: {self.folder} became {Path.cwd()}")
        now = {name: read() for name, (read, _) in _settings().items()}
        # A setting that appears is that of a module imported in the meantime; its default is no leak, save a group.
        found += [
            f"{name}: {before!r} became {after!r}"
            for name, before, after in _changes(_NO_GROUP | self.settings, _NO_GROUP | now)
            if name in self.settings or name == "default process group"
        ]
        found += [
            f"handler of {name}: {before!r} became {after!r}"
            for name, before, after in _changes(self.handlers, _handlers())
        ]
        started = [thread for thread in threading.enumerate() if thread.ident not in self.threads]
        return found + [
            f"thread left behind: {thread.name}"
            for thread in started
            if (daemons or not thread.daemon) and not _ends(thread)
        ]

    def restore(self) -> None:
        """Restore what can be restored, so that one leak is not reported for every later test."""
        for name in set(own_environment()) - set(self.environment):
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for name, handler in self.handlers.items():
            if handler is not None and signal.getsignal(signal.Signals[name]) != handler:
                signal.signal(signal.Signals[name], handler)
        for name, (read, write) in _settings().items():
            if name in self.settings and read() != self.settings[name]:
                write(self.settings[name])
        if "torch.distributed" in sys.modules and not self.settings.get("default process group"):
            _destroy_process_group()


def _ends(thread: threading.Thread) -> bool:
    """Whether the thread ends within a moment, as those of a pool after its shutdown."""
    thread.join(timeout=0.5)
    return not thread.is_alive()


@contextmanager
def unchanged() -> Iterator[None]:
    """Raise :class:`AssertionError`, naming each leak, when the block does not leave the process as it found it."""
    before = Snapshot()
    yield
    leaks = before.differences(daemons=True)
    before.restore()
    assert not leaks, "left behind: " + "; ".join(leaks)


def own_environment() -> dict[str, str]:
    """This process's environment without what only pytest and engines write."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def _handlers() -> dict[str, Any]:
    """Return the handlers of signals that end a process, which engines and launchers replace."""
    return {name: signal.getsignal(signal.Signals[name]) for name in ("SIGINT", "SIGTERM")}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Name, reader and writer of each of torch's global settings that we watch."""
    if "torch" not in sys.modules:
        return {}
    import torch

    settings: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (_default_device, _set_default_device),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        "float32 matmul precision": (_matmul_precision, torch.set_float32_matmul_precision),
    }
    if "torch.distributed" in sys.modules and torch.distributed.is_available():
        settings["default process group"] = (torch.distributed.is_initialized, _ignore)
    return settings


def _matmul_precision() -> str:
    """Read it without the warning that CUDA builds of torch 2.9 give: that there are newer settings."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        return torch.get_float32_matmul_precision()


def _default_device() -> Any:
    """Read it, also from torch 2.9.0, which cannot be asked any more once a script has set it to None."""
    import torch

    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def _set_default_device(device: Any) -> None:
    """The CPU is what torch takes when no default was set."""
    import torch

    torch.set_default_device(None if device.type == "cpu" else device)
    if device.type == "cpu":
        # As before it was ever set: torch 2.9.0 cannot be asked for it where it is None.
        vars(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", SimpleNamespace())).pop("device_context", None)


def _ignore(_: Any) -> None:
    """A process group cannot be brought back by assignment; :meth:`Snapshot.restore` destroys a leaked one."""


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
