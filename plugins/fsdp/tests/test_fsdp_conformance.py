"""``fsdp`` passes the conformance kit."""

from __future__ import annotations

from drivetrain.testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "fsdp"
    world_sizes = (2, 4)
