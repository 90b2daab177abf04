"""The reference backend passes the kit."""

from __future__ import annotations

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "single"
    shared_ranks = True
    world_sizes = (1,)
