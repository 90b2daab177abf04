from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.checkpoint import inspect
from drivetrain.checkpoint.owner import OWNER
from drivetrain_testing import spawn

# Forked from one process that has imported torch, so that 20 kills cost seconds.
KILLER = """
import json, os, pathlib, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import checkpoint_jobs
from drivetrain.checkpoint import Naming, inspect
from drivetrain.checkpoint.tensors import TensorFile

folder = pathlib.Path(sys.argv[2])

def highest():
    return max((int(path.name.split("_")[1]) for path in folder.glob("checkpoint_*")), default=-1)

checkpoint_jobs.train(*checkpoint_jobs.build("replicated", 0), 1)  # The first step of an optimizer imports much.
reports = []
for kill in range(20):
    before = highest()
    child = os.fork()
    if child == 0:
        checkpoint_jobs.resume_for_ever(folder)
        os._exit(1)
    while highest() <= before:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the saving process died by itself"
        time.sleep(0.002)
    time.sleep(random.Random(kill).uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    path = Naming(folder).latest()
    inspection = inspect(path)
    manifest = inspection.manifest
    chunk = manifest.tensors["model.gain"].chunks[0]
    gain = TensorFile(path / chunk.file).read(chunk.key, torch.float32, (1,)).item()
    leftovers = sum(one.name.startswith(".") for one in folder.iterdir())
    reports.append([inspection.problems, manifest.info["iteration"], manifest.counters["step"], gain, leftovers])
print(json.dumps(reports))
"""


@pytest.mark.slow
def test_killed_at_20_random_points_the_newest_complete_checkpoint_is_whole(jobs, tmp_path):
    """A process saves and prunes without end; after each kill the next one goes on from the newest complete one."""
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-W", "ignore", "-c", KILLER, str(Path(__file__).parent), str(folder)]
    killer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert killer.returncode == 0, killer.stderr
    reports = json.loads(killer.stdout)
    assert len(reports) == 20
    newest = -1
    for problems, iteration, step, gain, _ in reports:
        assert problems == []
        assert iteration == step == gain, "manifest and numbers are of one save"
        assert iteration > newest, "numbers go on after a resume"
        newest = iteration
    assert any(leftovers for *_, leftovers in reports), "some kill hit a save"
    assert spawn(jobs.resume_once, 2, folder) == [newest, newest]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], "dead saves were cleared away"
    assert len(list(folder.iterdir())) <= 4  # total_limit=3, and one more: the kill came before the pruning.


def test_killed_while_replacing_a_checkpoint_the_old_or_the_new_one_is_whole(tmp_path):
    """Every file operation of a replacement is a possible end of the process."""
    seen = set()
    for point in range(100):
        target = tmp_path / f"run-{point}" / "ckpt"
        process = subprocess.run(
            [sys.executable, "-c", REPLACE, str(target), str(point)], check=False, capture_output=True, text=True
        )
        assert process.returncode in (0, 9), process.stderr
        inspection = inspect(target)
        assert inspection.problems == ()
        assert (target / "notes.txt").read_text() == "the user's own"
        seen.add(inspection.manifest.info["iteration"])
        if process.returncode == 0:
            break
    assert process.returncode == 0, "some run reached the end"
    assert seen == {1, 2}
    assert len(list(target.glob("data-*"))) == 1, "the old page is gone"


# No torch: the file layer alone, so that a hundred processes cost seconds.
REPLACE = """
import os, pathlib, sys, time
target, point = pathlib.Path(sys.argv[1]), int(sys.argv[2])
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import CheckedFile, storage_of
storage = storage_of(target)

def write(iteration):
    staging = storage.stage(target)
    with CheckedFile(staging.data / "numbers") as file:
        file.write(bytes([iteration]) * 1000)
    files = {f"{staging.data.name}/numbers": file.entry}
    storage.commit(staging, Manifest("B", {}, 1, float(iteration), info={"iteration": iteration}, files=files))

write(1)
(target / "notes.txt").write_text("the user's own")
count = -1
def end(event, args):
    global count
    if event.startswith(("os.", "shutil.", "open")):
        count += 1
        if count == point:
            os._exit(9)
sys.addaudithook(end)
write(2)
"""


def test_a_rank_whose_disk_is_full_fails_every_rank_and_leaves_nothing(jobs, tmp_path):
    path = tmp_path / "runs" / "ckpt"
    for kind, text, left in spawn(jobs.limited_job, 2, path, 100_000):
        assert kind == "CheckpointError"
        assert "rank 1 of 2: could not write its part of the checkpoint" in text
        assert "File too large" in text
        assert left == []


def test_a_full_disk_leaves_the_older_checkpoint(jobs, tmp_path):
    path = tmp_path / "ckpt"
    spawn(jobs.save_job, 2, path, "replicated")
    before = contents(path)
    assert spawn(jobs.limited_job, 2, path, 100_000)[0][0] == "CheckpointError"
    assert contents(path) == before


def contents(path):
    """Every file but the one that says who writes here."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != OWNER)
    return {file.name: file.read_bytes() for file in files}


def test_what_cannot_be_saved_is_named_on_every_rank_before_anything_is_written(jobs, tmp_path):
    for kind, text, exists in spawn(jobs.unsavable_job, 2, tmp_path / "ckpt"):
        assert kind == "CheckpointError"
        assert "rank 1 of 2: objects.custom.0.inner[1] is of type object" in text
        assert not exists
    assert list(tmp_path.iterdir()) == []
