"""Cases that share a group of ranks pass only where they would pass alone."""

from __future__ import annotations

from pathlib import Path

import wrong_backends

from drivetrain_testing.kit import Kit, passed_together
from drivetrain_testing.requirements import BaseRequirements

FINE = ("gradients.dense", "clipping.clips_as_one_process_does")


def passed(name: str, registered_by: str, cases: tuple[str, ...], folder: Path) -> frozenset[str]:
    class Requirements(BaseRequirements):
        backend = name
        setup = registered_by

    kits = {}
    for case in cases:
        (folder / case).mkdir()
        kits[case] = Kit.of(Requirements, 2, folder / case)
    return passed_together(kits, 2, folder)


def test_every_case_of_a_right_backend_passes(tmp_path: Path) -> None:
    assert passed("toy", "toy_backend:register", FINE, tmp_path) == set(FINE)


def test_a_failure_ends_the_group_and_is_no_pass(tmp_path: Path) -> None:
    assert "savespart" in wrong_backends.MISTAKES
    cases = (FINE[0], "state.load_undoes", FINE[1])
    assert passed("savespart", "wrong_backends:register", cases, tmp_path) == {FINE[0]}


def test_what_a_case_leaves_behind_is_found_here_too(tmp_path: Path) -> None:
    assert passed("leavesvariables", "wrong_backends:register", FINE, tmp_path) == frozenset()
