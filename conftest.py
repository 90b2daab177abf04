"""Every test of every distribution runs under the hygiene plugin of the conformance kit."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

from drivetrain_testing import preload

# Ranks share few cores, and a process that is forked after OpenMP made its threads hangs in its next parallel loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loader's worker forked from here leaves the garbage of earlier tests alone. It would join the threads of their
# stores, which only this process has, and die. Drivetrain does the same where it forms a process group.
os.register_at_fork(after_in_child=gc.freeze)

# A program that a test starts buffers what it prints, as it does on a user's machine.
os.environ.pop("PYTHONUNBUFFERED", None)

pytest_plugins = ["drivetrain_testing.plugin", "suite_gate"]

# What a rank imports to train and to be tested, each anew.
preload(
    *("drivetrain_testing.cases", "drivetrain_testing.kit", "drivetrain_testing.scenario", "torch.distributed.fsdp"),
    *(f"drivetrain_{name}.backend" for name in ("ddp", "dp", "fsdp", "deepspeed") if find_spec(f"drivetrain_{name}")),
)
