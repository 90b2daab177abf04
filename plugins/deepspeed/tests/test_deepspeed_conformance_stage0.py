"""``deepspeed`` in stage 0 passes the conformance kit."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "deepspeed"
    shared_ranks = True
    world_sizes = (2,)
    section: ClassVar = {"zero_stage": 0}
    gaps: ClassVar = {
        "honesty.every_rank_saves_its_part": "sharded_save is said for stages 1 to 3; in stage 0 every rank holds all",
    }
