"""``megatron`` passes the conformance kit as a pipeline of two stages; tensor parallelism has a file of its own."""

from __future__ import annotations

from typing import ClassVar

import pytest

from drivetrain_testing.suite import *  # noqa: F403

# `drivetrain test` makes a single layer a unit of FSDP. Under tp its output is a view; torch warns of writing to one
# in place, which that model does not do.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "num_micro_batches": 2}
LAYOUTS = [TP | PP, TP, *(axis | {"data_parallel": data} for axis in (TP, PP) for data in ("zero1", "fsdp"))]


class Requirements(BaseRequirements):  # noqa: F405
    backend = "megatron"
    shared_ranks = True
    world_sizes = (2, 4)
    section: ClassVar = {"pipeline_parallel_size": 2, "num_micro_batches": 2}
    axis_sections: ClassVar = {"dp_shard": {"data_parallel": "fsdp"}}
    layouts: ClassVar = {4: [{"megatron": section} for section in LAYOUTS]}
    gaps: ClassVar = {
        "gradients.unused_parameters": "a model of two modules, one of them never called, has no place to be cut",
    }
