"""The same checkpoint: what one backend saves in the middle of an epoch, another one resumes, in any world."""

from __future__ import annotations

from pathlib import Path

from drivetrain.testing import spawn
from drivetrain.testing.cases import state
from drivetrain.testing.kit import Kit, run_in_rank
from drivetrain.testing.scenario import assert_same_state, reference


def test_run_goes_on_under_another_backend(journey: tuple[tuple[str, int], tuple[str, int]], tmp_path: Path) -> None:
    source, target = (Kit.plain(backend, tmp_path) for backend, _ in journey)
    uninterrupted = spawn(run_in_rank, journey[0][1], state.first_part, source)[0]
    for resumed in spawn(run_in_rank, journey[1][1], state.second_part, target):
        assert_same_state(resumed, uninterrupted, 2e-6)  # two worlds add in another order
    assert_same_state(uninterrupted, reference(state.RUN).state, 1e-5)
