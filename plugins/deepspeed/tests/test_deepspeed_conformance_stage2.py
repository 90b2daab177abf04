"""``deepspeed`` in stage 2 passes the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain_testing.kit import CONTRACT, Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403

# Stage 3 runs in `make test`; this one differs from it in what DeepSpeed itself keeps in pieces.
pytestmark = pytest.mark.slow


class Requirements(BaseRequirements):  # noqa: F405
    backend = "deepspeed"
    shared_ranks = True
    world_sizes = (2,)
    section: ClassVar = {"zero_stage": 2}


@pytest.mark.parametrize("case", CONTRACT)
def test_the_contract_on_four_processes(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Requirements, 4, tmp_path), 4)
