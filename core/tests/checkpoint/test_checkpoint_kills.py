"""Kills at random points of sharded saves, half of them in the background: the newest complete checkpoint always loads.

With the 20 of ``test_checkpoint_crash.py`` these are 200 in the file system, and 30 on an object store. Successive jobs
have 2, 1 and 3 processes, so that each takes up what another world has left.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import object_store
import pytest

from drivetrain_testing import spawn

SCRIPT = Path(__file__).with_name("kill_jobs.py")


def newest_after_kills(folder, victim, kills, *place, timeout=115):
    """Run jobs that save in a folder, kill each, and check what every kill left; the newest checkpoint's number."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), victim, str(kills), *map(str, place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, env=environment)
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
    assert any(unfinished for *_, unfinished in reports), "some kill hit a save"
    return newest


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "kills"), [("rank", 72), ("launcher", 48)])
def test_the_newest_complete_checkpoint_is_whole_after_every_kill(killing, tmp_path, victim, kills):
    folder = tmp_path / "checkpoints"
    newest = newest_after_kills(folder, victim, kills)
    assert spawn(killing.load_job, 2, folder) == [newest, newest]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_the_newest_complete_checkpoint_of_a_remote_storage_is_whole_after_every_kill(tmp_path, victim):
    with object_store.serving():
        newest_after_kills("bucket://bucket/run", victim, 15, tmp_path, timeout=300)


@pytest.mark.slow
def test_a_disk_that_is_full_at_random_points_never_costs_the_newest_checkpoint(killing, tmp_path):
    folder = tmp_path / "checkpoints"
    (first, *others) = spawn(killing.full_disk_job, 2, folder, 60, timeout=100)
    failures, problems, left, newest, _ = first
    assert 10 < failures < 60, "some points are within a save, some behind its end"
    assert [each[0] for each in others] == [failures], "every rank learns of every failure"
    assert problems == []
    assert left == [], "failed saves leave nothing"
    assert spawn(killing.load_job, 3, folder) == [newest] * 3


SMALL_DISK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import kill_jobs
from drivetrain_testing import spawn
disk = Path(sys.argv[2])
reports = spawn(kill_jobs.full_disk_job, 2, disk / "checkpoints", 24, True, timeout=90)
newest = spawn(kill_jobs.load_job, 3, disk / "checkpoints")
print(json.dumps([reports, newest]))
"""


def _can_mount(folder):
    """Whether this user may mount a disk in a namespace of its own."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return shutil.which("unshare") and subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_small_disk_that_is_really_full_never_costs_the_newest_checkpoint(tmp_path):
    if not _can_mount(tmp_path):
        pytest.skip("this machine lets nobody mount a small tmpfs; the test before this limits the size of files")
    job = [sys.executable, "-W", "ignore", "-c", SMALL_DISK, str(SCRIPT.parent), str(tmp_path)]
    mounted = f'mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(tmp_path))} && exec "$@"'
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", *job]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    reports, newest = json.loads(done.stdout.splitlines()[-1])
    failures, problems, left, last, errors = reports[0]
    assert 4 < failures < 24, "some points are within a save, some behind its end"
    assert [report[0] for report in reports] == [failures] * 2, "every rank learns of every failure"
    assert all("No space left" in error for error in errors), errors
    assert problems == []
    assert left == [], "failed saves leave nothing"
    assert newest == [last] * 3, "on another world size too"
    assert list(tmp_path.iterdir()) == [], "the disk was the namespace's own"
