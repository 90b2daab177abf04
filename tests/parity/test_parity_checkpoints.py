"""The same checkpoint: what one backend saves in the middle of an epoch, another one resumes, in any world.

Each source trains and saves once. Each target is one job, which takes up all of its sources in turn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain_testing import RankFailedError, spawn
from drivetrain_testing.cases import state
from drivetrain_testing.kit import Kit, run_in_rank
from drivetrain_testing.processes import RankTimeoutError
from drivetrain_testing.scenario import assert_same_state, reference

Place = tuple[str, int]
"""A backend and a world size."""

State = dict[str, Tensor]
"""Parameters in full."""

END = "end-{rank}.pt"
"""File of what a rank of a target ended with."""


def take_up(kits: list[Kit]) -> None:
    """Resume each of these runs and go on to its end. What came of one is on disk, whatever becomes of the next."""
    for kit in kits:
        end = run_in_rank(state.second_part, kit)
        written = kit.shared / "being-written-{RANK}".format_map(os.environ)
        torch.save(end, written)
        written.rename(kit.shared / END.format(rank=os.environ["RANK"]))


def all_taken_up(
    target: Place, saved: Mapping[Place, Path], new_folder: Callable[[str], Path]
) -> dict[Place, list[State] | RankFailedError]:
    """What each rank of the target ended with, for every source; the error where it did not come to the end.

    A failure ends the job, since other ranks may be waiting for the one that failed. It belongs to the source that
    was being taken up, and fresh ranks take up those that come after it; a hang belongs to all that were not reached,
    since waiting for each of them would take too long.
    """
    backend, world_size = target
    found: dict[Place, list[State] | RankFailedError] = {}
    while left := [source for source in saved if source not in found]:
        # Copies: nobody reads what another reader has left behind.
        folder = new_folder("taken-up")
        copies = [Path(shutil.copytree(saved[source], folder / str(number))) for number, source in enumerate(left)]
        kits = [Kit.plain(backend, copy) for copy in copies]
        failure = None
        try:
            spawn(take_up, world_size, kits, timeout=30 + 5 * len(kits))
        except RankFailedError as error:
            failure = error
        for source, copy in zip(left, copies, strict=True):
            ends = [copy / END.format(rank=rank) for rank in range(world_size)]
            if all(end.exists() for end in ends):
                found[source] = [torch.load(end) for end in ends]
                continue
            assert failure is not None, f"{target} did not take up {source}"
            found[source] = failure
            if not isinstance(failure, RankTimeoutError):
                break
        else:
            if failure is not None:  # after the last one was over
                found[left[-1]] = failure
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a source: the folder that it saved into, and what it went on to without being stopped."""
    done: dict[Place, tuple[Path, State] | RankFailedError] = {}

    def of(source: Place) -> tuple[Path, State]:
        if source not in done:
            backend, world_size = source
            folder = tmp_path_factory.mktemp("saved")
            try:
                states = spawn(run_in_rank, world_size, state.first_part, Kit.plain(backend, folder))
                done[source] = folder, states[0]
            except RankFailedError as error:
                done[source] = error
        return known(done[source])

    return of


@pytest.fixture(scope="module")
def resumed(request, saved, tmp_path_factory):
    """Of a journey: what each rank of the target ended with; the target's job runs when its first test does."""
    # Only those that are asked for: one chosen by hand needs one source.
    tests = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    journeys = [test.callspec.params["journey"] for test in tests]
    done: dict[Place, dict[Place, list[State] | RankFailedError]] = {}

    def of(source: Place, target: Place) -> list[State]:
        if target not in done:
            folders = {}
            for wanted in (source for source, goal in journeys if goal == target):
                with contextlib.suppress(RankFailedError):  # Told by the tests of that source.
                    folders[wanted], _ = saved(wanted)
            done[target] = all_taken_up(target, folders, tmp_path_factory.mktemp)
        return known(done[target][source])

    return of


def known(outcome):
    """The outcome itself, raised where it is an error."""
    if isinstance(outcome, RankFailedError):
        raise outcome.with_traceback(None)  # Several tests raise it, each from here.
    return outcome


def test_run_goes_on_under_another_backend(journey: tuple[Place, Place], saved, resumed) -> None:
    source, target = journey
    _, uninterrupted = saved(source)
    for end in resumed(source, target):
        assert_same_state(end, uninterrupted, 2e-6)  # two worlds add in another order
    assert_same_state(uninterrupted, reference(state.RUN).state, 1e-5)
