"""``deepspeed`` in stage 0 passes the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain_testing.kit import Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "deepspeed"
    shared_ranks = True
    world_sizes = (2,)
    section: ClassVar = {"zero_stage": 0}


@pytest.mark.parametrize(
    "case",
    [
        "gradients.ragged_labels",
        "gradients.empty_micro_batch",
        "gradients.explicit_step",
        "windows.ragged_windows",
        "clipping.clips_as_one_process_does",
    ],
)
def test_the_contract_on_four_processes(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Requirements, 4, tmp_path), 4)
