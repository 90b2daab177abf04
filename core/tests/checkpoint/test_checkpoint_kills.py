"""Kills at random points of sharded saves, half of them in the background: the newest complete checkpoint always loads.

With the 20 of ``test_checkpoint_crash.py`` these are 200. Successive jobs have 2, 1 and 3 processes, so that each
takes up what another world has left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing import spawn

SCRIPT = Path(__file__).with_name("kill_jobs.py")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "kills"), [("rank", 72), ("launcher", 48)])
def test_the_newest_complete_checkpoint_is_whole_after_every_kill(killing, tmp_path, victim, kills):
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), victim, str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=115, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == kills
    newest = -1
    for problems, iteration, gain, _, _ in reports:
        assert problems == []
        assert iteration == gain, "manifest and numbers are of one save"
        assert iteration > newest, "the next job went on from it, in another world, and came further"
        newest = iteration
    assert {world for *_, world, _ in reports} == {1, 2, 3}
    assert any(hidden for *_, hidden in reports), "some kill hit a save"
    assert spawn(killing.load_job, 2, folder) == [newest, newest]


@pytest.mark.slow
def test_a_disk_that_is_full_at_random_points_never_costs_the_newest_checkpoint(killing, tmp_path):
    folder = tmp_path / "checkpoints"
    (first, *others) = spawn(killing.full_disk_job, 2, folder, 60, timeout=100)
    failures, problems, left, newest = first
    assert 10 < failures < 60, "some points are within a save, some behind its end"
    assert [each[0] for each in others] == [failures], "every rank learns of every failure"
    assert problems == []
    assert left == [], "failed saves leave nothing"
    assert spawn(killing.load_job, 3, folder) == [newest] * 3
