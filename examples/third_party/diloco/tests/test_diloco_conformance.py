"""In synchronous steps ``diloco`` keeps the contract: the conformance kit, with one gap for its buffers."""

from __future__ import annotations

from typing import ClassVar

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "diloco"
    world_sizes = (1, 2)
    section: ClassVar = {"synchronous_steps": 1000}
    axis_sections: ClassVar = {"dp_replicate": {"synchronous_steps": 1000}}
    unused_parameters: ClassVar = {"find_unused_parameters": True}
    shared_ranks = True
    gaps: ClassVar = {
        "evaluation.buffers_of_a_batch": "each worker has buffers of its own, which the end of a round averages"
    }
