"""``dp`` passes the conformance kit."""

from __future__ import annotations

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "dp"
    shared_ranks = True
    world_sizes = (1,)
