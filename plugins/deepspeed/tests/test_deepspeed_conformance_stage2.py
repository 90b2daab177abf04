"""``deepspeed`` in stage 2 passes the conformance kit."""

from __future__ import annotations

from typing import ClassVar

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "deepspeed"
    shared_ranks = True
    world_sizes = (2, 4)
    section: ClassVar = {"zero_stage": 2}
