"""``megatron`` passes the conformance kit as a pipeline of two stages; tensor parallelism has a file of its own."""

from __future__ import annotations

from typing import ClassVar

from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "megatron"
    shared_ranks = True
    world_sizes = (2, 4)
    section: ClassVar = {"pipeline_parallel_size": 2, "num_micro_batches": 2}
    axis_sections: ClassVar = {"dp_shard": {"data_parallel": "fsdp"}}
    gaps: ClassVar = {
        "gradients.unused_parameters": "a model of two modules, one of them never called, has no place to be cut",
    }
