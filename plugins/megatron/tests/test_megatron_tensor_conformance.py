"""``megatron`` passes the conformance kit on a tensor-parallel axis, alone and with data parallelism around it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain_testing.kit import Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "megatron"
    world_sizes = (2,)
    section: ClassVar = {"tensor_parallel_size": 2}
    axis_sections: ClassVar = {"dp_shard": {"data_parallel": "fsdp"}}
    shared_ranks = True


class Sequences(Requirements):
    section: ClassVar = {"tensor_parallel_size": 2, "sequence_parallel": True}


CASES = [
    "gradients.ragged_labels",
    "windows.ragged_windows",
    "clipping.clips_as_one_process_does",
    "state.resumed_equals_uninterrupted",
    "honesty.every_rank_saves_its_part",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.gate("gradients.*", "state.*")
def test_data_parallelism_around_it(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Requirements, 4, tmp_path), 4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.gate("windows.*", "clipping.*")
def test_sequence_parallelism(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Sequences, 2, tmp_path), 2)
