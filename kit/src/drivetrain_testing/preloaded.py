"""Imports what ranks need, once, in the fork server, so that a rank starts in hundredths of a second.

Everything a rank is likely to import is imported here, the collector is run once and the heap is frozen: without the
freeze the first collection in a rank walks, and by that copies, the whole preloaded heap (0.2 s a rank, measured).
Imports only: a tensor operation would start threads, and a process with threads must not be forked.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from pathlib import Path

EXTRA = "DRIVETRAIN_TESTING_PRELOAD"
"""Environment variable with further modules to import, separated by commas; see :func:`drivetrain_testing.preload`."""

MODULES = (
    "numpy",
    "pluggy",
    "pydantic",
    "pytest",
    "yaml",
    "click",
    "safetensors.torch",
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.join",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "drivetrain",
    "drivetrain.accelerator",
)
"""The engine-free part. A module that is not installed is no error here: whoever needs it will say so."""

PACKAGES = ("backends", "checkpoint", "compat", "config", "data", "distributed", "launch", "loop")
"""Packages of the core of which every module is imported."""


def _names() -> list[str]:
    import drivetrain

    names = [*MODULES, *(name for name in os.environ.get(EXTRA, "").split(",") if name)]
    for package in PACKAGES:
        paths = [str(Path(path) / package) for path in drivetrain.__path__]
        names += [found.name for found in pkgutil.walk_packages(paths, f"drivetrain.{package}.")]
    return names


def _load() -> None:
    for name in _names():
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - preloading is a matter of speed: a broken module must not
            # stop the tests of all others; the rank that imports it itself raises the same error in its test.
            sys.stderr.write(f"drivetrain_testing: {name} was not preloaded: {error!r}\n")
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


_load()
