"""``ddp`` passes the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain_testing.kit import CONTRACT, Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "ddp"
    shared_ranks = True
    world_sizes = (1, 2)
    unused_parameters: ClassVar = {"find_unused_parameters": True}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTRACT)
def test_the_contract_on_four_processes(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Requirements, 4, tmp_path), 4)
