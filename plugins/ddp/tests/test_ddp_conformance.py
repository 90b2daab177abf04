"""``ddp`` passes the conformance kit."""

from __future__ import annotations

from typing import ClassVar

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "ddp"
    shared_ranks = True
    world_sizes = (1, 2, 4)
    unused_parameters: ClassVar = {"find_unused_parameters": True}
