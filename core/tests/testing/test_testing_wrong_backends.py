"""The kit catches every wrong backend, by the cases that are meant to."""

from __future__ import annotations

from pathlib import Path

import pytest
import wrong_backends

from drivetrain.errors import DrivetrainError
from drivetrain.testing import RankFailedError
from drivetrain.testing.kit import Kit, all_cases, run_case
from drivetrain.testing.requirements import BaseRequirements

CATCHES = [(name, case) for name, kind in wrong_backends.MISTAKES.items() for case in kind.caught_by]


@pytest.mark.parametrize(("mistake", "case"), CATCHES)
def test_mistake_is_caught(mistake: str, case: str, tmp_path: Path) -> None:
    class Requirements(BaseRequirements):
        backend = mistake
        setup = "wrong_backends:register"

    assert case in all_cases()
    with pytest.raises(RankFailedError) as caught:
        run_case(case, Kit.of(Requirements, 2, tmp_path), 2)
    # Caught by what a case states, not by a mistake of the mistake's own or by a broken connection.
    assert isinstance(caught.value.cause, AssertionError | DrivetrainError), caught.value


def test_there_are_enough() -> None:
    assert len(wrong_backends.MISTAKES) >= 12
