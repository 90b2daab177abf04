"""``xla`` passes the conformance kit: one device, and two processes whose gradients meet on the host."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

from drivetrain.testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "xla"
    world_sizes = (1, 2)
    shared_ranks = True
