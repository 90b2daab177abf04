"""``xla`` passes the conformance kit as one mesh of four devices too: parameters in shards, and cut for ``tp``."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

from drivetrain_testing.suite import *  # noqa: F403


@pytest.fixture(autouse=True)
def _four_devices(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")


ONE_PROCESS = "one process drives all devices of a mesh, and these cases start several"
HOOKS = "hooks that were set on parameters before prepare are lost when these move to a device of XLA"


class Requirements(BaseRequirements):  # noqa: F405
    backend = "xla"
    world_sizes = (1,)
    shared_ranks = True
    mesh: ClassVar = {1: {"dp_shard": 2, "tp": 2}}
    # The kit's parameters are small; all of them are cut that can be.
    section: ClassVar = {"min_shard_elements": 1}
    gaps: ClassVar = {
        "mesh.dp_replicate": ONE_PROCESS,
        "mesh.dp_shard": ONE_PROCESS,
        "mesh.tp": ONE_PROCESS,
        "uneven.three_ranks": ONE_PROCESS,
        "scripts.three_ranks": ONE_PROCESS,
        "scripts.hooks_of_parameters": HOOKS,
        "scripts.forwards_that_write": ONE_PROCESS,
        "evaluation.buffers_of_a_batch": ONE_PROCESS,
    }
