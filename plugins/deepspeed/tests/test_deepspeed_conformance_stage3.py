"""``deepspeed`` in stage 3 passes the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain_testing.kit import Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "deepspeed"
    shared_ranks = True
    world_sizes = (2, 4)
    section: ClassVar = {"zero_stage": 3}


class SecondPartition(Requirements):
    """ZeRO++: backward gathers parameters from two neighbours instead of all four ranks."""

    section: ClassVar = {"zero_stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}


@pytest.mark.gate("state.resumed_equals_uninterrupted")
@pytest.mark.parametrize(
    "case", ["windows.ragged_windows", "clipping.clips_as_one_process_does", "state.resumed_equals_uninterrupted"]
)
def test_a_second_partition(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(SecondPartition, 4, tmp_path), 4)
