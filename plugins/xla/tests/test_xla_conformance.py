"""``xla`` passes the conformance kit: one device, and two processes whose gradients meet on the host."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

from drivetrain_testing.suite import *  # noqa: F403

ONE_PROCESS = "one process drives all devices of a mesh; in test_xla_mesh_conformance every case runs on one"
HOOKS = "hooks that were set on parameters before prepare are lost when these move to a device of XLA"


class Requirements(BaseRequirements):  # noqa: F405
    backend = "xla"
    world_sizes = (1, 2)
    shared_ranks = True
    gaps: ClassVar = {
        "mesh.dp_replicate": ONE_PROCESS,
        "mesh.dp_shard": ONE_PROCESS,
        "mesh.tp": ONE_PROCESS,
        "uneven.three_ranks": ONE_PROCESS,
        "scripts.three_ranks": ONE_PROCESS,
        "scripts.hooks_of_parameters": HOOKS,
        "scripts.forwards_that_write": "parameters of several processes are not compared",
        "evaluation.buffers_of_a_batch": "buffers of several processes are not compared",
    }
