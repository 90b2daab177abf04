"""A folder belongs to one run at a time: numbers, pruning, the owner file, and a second writer."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.checkpoint import Naming, inspect
from drivetrain.checkpoint import owner as owners
from drivetrain.checkpoint.manifest import MANIFEST, Manifest
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.errors import CheckpointError
from drivetrain_testing import spawn


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    owners.release()


# ---- numbers and pruning --------------------------------------------------------------------------------------------


def numbered_run(folder, saves, value, resume=False, limit=2, path=None):
    """A run that saves under automatic names; what it was told and what it loads at the end."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(2, 2))
    if resume:
        accelerator.load_state(path)
    made = []
    for _ in range(saves):
        nn.init.constant_(model.weight, value)
        made.append(Path(accelerator.save_state()))
        assert (made[-1] / MANIFEST).exists(), "what was just written is there"
    nn.init.zeros_(model.weight)
    loaded = Path(accelerator.load_state())
    result = [one.name for one in made], loaded.name, model.weight.mean().item()
    accelerator.end_training()
    return result


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_begun_anew_in_a_rotated_folder_goes_on_counting_and_keeps_its_own(tmp_path, world_size):
    folder = tmp_path / "checkpoints"
    spawn(numbered_run, world_size, tmp_path, 5, 1.0)
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoint_3", "checkpoint_4"]
    made, loaded, value = spawn(numbered_run, world_size, tmp_path, 3, 2.0)[0]
    assert made == ["checkpoint_5", "checkpoint_6", "checkpoint_7"]
    assert (loaded, value) == ("checkpoint_7", 2.0)
    others, own = {"checkpoint_3", "checkpoint_4"}, {"checkpoint_6", "checkpoint_7"}
    assert {one.name for one in folder.iterdir()} == others | own, "another run's are not this run's to delete"
    made, _, _ = spawn(numbered_run, world_size, tmp_path, 2, 3.0, resume=True)[0]
    assert made == ["checkpoint_8", "checkpoint_9"]
    assert {one.name for one in folder.iterdir()} == {*others, *made}, "a run that goes on prunes what it went on from"


def test_a_run_begun_anew_is_told_what_lies_there(tmp_path, caplog):
    numbered_run(tmp_path, 2, 1.0)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        numbered_run(tmp_path, 2, 2.0)
    assert caplog.text.count("of an earlier run, up to checkpoint_1, and this run was begun anew") == 1
    caplog.clear()
    numbered_run(tmp_path, 1, 2.0, resume=True)
    assert caplog.text == ""


def test_going_on_from_another_folders_checkpoint_deletes_nothing_of_a_third_run(tmp_path):
    numbered_run(tmp_path / "a", 2, 1.0)
    numbered_run(tmp_path / "b", 2, 2.0)
    numbered_run(tmp_path / "b", 2, 3.0, resume=True, path=tmp_path / "a/checkpoints/checkpoint_1")
    left = {one.name for one in (tmp_path / "b/checkpoints").iterdir()}
    assert left == {"checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"}


def test_a_number_in_a_manifest_does_not_make_a_renamed_checkpoint_the_newest(tmp_path):
    numbered_run(tmp_path, 9, 1.0)
    (tmp_path / "checkpoints/checkpoint_8").rename(tmp_path / "checkpoints/checkpoint_1")
    made, loaded, _ = numbered_run(tmp_path, 1, 2.0, resume=True)
    assert made == [loaded] == ["checkpoint_8"]


def test_pruning_removes_nothing_that_is_not_older_than_what_was_written(tmp_path):
    for number in (1, 2, 7, 8):
        manifest = Manifest("B", {}, 1, 0.0, info={"iteration": number})
        (tmp_path / f"checkpoint_{number}").mkdir()
        (tmp_path / f"checkpoint_{number}" / MANIFEST).write_text(manifest.to_json())
    assert Naming(tmp_path, 1).prune(tmp_path / "checkpoint_2") == [tmp_path / "checkpoint_1"]
    with pytest.raises(CheckpointError, match="checkpoint_5, which was just saved, is gone"):
        Naming(tmp_path, 1).prune(tmp_path / "checkpoint_5")
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint_2", "checkpoint_7", "checkpoint_8"}


def named_path(folder):
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(2, 2))
    paths = []
    for number, path in enumerate((None, folder / "best", None, folder / "best", folder / "beside")):
        nn.init.constant_(model.weight, float(number))
        paths.append(Path(accelerator.save_state(path, blocking=number != 4)))
    accelerator.load_state(folder / "best")
    best = model.weight.mean().item()
    newest = Path(accelerator.load_state()).name
    accelerator.end_training()
    return paths, best, newest


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_path_under_automatic_naming_is_where_the_checkpoint_goes(tmp_path, world_size):
    folder = tmp_path / "checkpoints"
    for paths, best, newest in spawn(named_path, world_size, tmp_path):
        first, second = folder / "checkpoint_0", folder / "checkpoint_1"
        assert paths == [first, tmp_path / "best", second, tmp_path / "best", tmp_path / "beside"]
        assert best == 3.0
        assert newest == "checkpoint_1", "only automatic names are counted"
    assert inspect(tmp_path / "beside").problems == ()


# ---- two writers ----------------------------------------------------------------------------------------------------

LINGERING = """
import sys, time
from pathlib import Path
from drivetrain.checkpoint import Manifest, Naming, storage_of
folder = Path(sys.argv[1])
target = folder / f"checkpoint_{Naming(folder).claim_next()}" if sys.argv[2] == "numbered" else folder
storage = storage_of(target)
storage.commit(storage.stage(target), Manifest("B", {}, 1, 0.0, info={"iteration": 0}))
print("saved", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lingering():
    """Starts a job that saves once and stays; returns its process."""
    started = []

    def start(folder, how):
        command = [sys.executable, "-c", LINGERING, str(folder), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "saved\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def contents(folder):
    """Every file below the folder and beside it, with its content."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_to(folder, how):
    """Another job's save; ``None``, or the error."""
    project = ProjectConfiguration(folder.parent, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project if how == "numbered" else None)
    accelerator.prepare(nn.Linear(2, 2))
    try:
        accelerator.save_state({"numbered": None, "fixed": folder, "within": folder / "checkpoint_0"}[how])
    except CheckpointError as problem:
        return str(problem)
    finally:
        accelerator.end_training()
    return None


@pytest.mark.parametrize(
    ("first", "second"), [("numbered", "numbered"), ("fixed", "fixed"), ("numbered", "within"), ("numbered", "fixed")]
)
def test_a_second_writer_raises_before_it_changes_anything(lingering, tmp_path, first, second):
    folder = tmp_path / "checkpoints"
    process = lingering(folder, first)
    (folder / "data-000000000000").mkdir()  # As a save leaves it between its move and its manifest.
    (folder / "data-000000000000/x").write_text("the other's")
    before = contents(tmp_path)
    for problem in spawn(save_to, 3, folder, second):
        assert f"process {process.pid} on " in problem
        assert "which is alive" in problem
        assert "save into another folder" in problem
    assert contents(tmp_path) == before
    process.kill()
    process.wait()
    assert spawn(save_to, 3, folder, second) == [None] * 3, "a dead owner's folder is taken over"
    if first == second:
        assert not list(tmp_path.rglob(f"*{owners.OWNER}")), "and given back at the end"


def test_of_two_first_saves_at_a_new_path_the_second_raises(lingering, tmp_path):
    target = tmp_path / "ckpt"
    storage = LocalStorage()
    staging = storage.stage(target)
    process = lingering(target, "fixed")
    before = contents(target)
    with pytest.raises(CheckpointError, match=f"belongs to process {process.pid} on .*, which is alive"):
        storage.commit(staging, Manifest("B", {}, 1, 0.0))
    assert contents(target) == before


def test_a_writer_that_was_taken_for_dead_raises_and_changes_nothing(tmp_path):
    naming = Naming(tmp_path / "checkpoints", total_limit=1)
    naming.claim_next()
    storage = LocalStorage()
    storage.commit(storage.stage(naming.path), Manifest("B", {}, 1, 0.0))
    naming.claim_next()
    second = naming.path
    staging = storage.stage(second)
    file = tmp_path / ".checkpoints.owner.json"
    other = json.loads(file.read_text()) | {"machine": "there/boot/1"}
    file.write_text(json.dumps(other))
    before = contents(tmp_path / "checkpoints/checkpoint_0")
    with pytest.raises(CheckpointError, match=r"belongs to process .* on there"):
        storage.commit(staging, Manifest("B", {}, 1, 0.0))
    assert not second.exists()
    assert contents(tmp_path / "checkpoints/checkpoint_0") == before


def of_another_machine(folder):
    """Let the folder be held by a process elsewhere."""
    owners.claim(folder)
    file = folder / owners.OWNER
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "there/boot/1"}))
    owners.release()
    return file


def test_elsewhere_an_owner_lives_while_it_renews_its_file(tmp_path, monkeypatch, caplog):
    file = of_another_machine(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: os.utime(file))
    with pytest.raises(CheckpointError, match="on there, which is alive"):
        owners.claim(tmp_path)
    assert "waiting up to" in caplog.text
    assert json.loads(file.read_text())["machine"] == "there/boot/1"


def test_elsewhere_an_owner_is_dead_that_renews_nothing(tmp_path, monkeypatch):
    file = of_another_machine(tmp_path)
    monkeypatch.setattr(owners, "DEAD_SECONDS", 0.2)
    owners.claim(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    file = of_another_machine(tmp_path)
    os.utime(file, (1.0, 1.0))
    monkeypatch.setattr(owners, "DEAD_SECONDS", 1e6)
    owners.claim(tmp_path)
    assert owners.holds(tmp_path)


def test_an_owner_renews_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.01)
    owners.claim(tmp_path)
    file = tmp_path / owners.OWNER
    os.utime(file, (1.0, 1.0))
    while file.stat().st_mtime == 1.0:  # The test's own time-out ends it.
        time.sleep(0.01)


def test_a_zombie_and_a_later_process_with_the_same_number_are_dead(tmp_path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not owners.is_alive(child)
    os.waitpid(child, 0)
    assert owners.is_alive(os.getpid())
    assert not owners.is_alive(os.getpid(), started="1")


def test_a_copy_of_a_folder_has_no_owner(lingering, tmp_path):
    lingering(tmp_path / "ckpt", "fixed")
    shutil.copytree(tmp_path / "ckpt", tmp_path / "copy")
    owners.claim(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="which is alive"):
        owners.claim(tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="which is alive"):
        owners.claim(tmp_path / "link")


def test_a_file_that_says_nothing_is_judged_by_its_age(tmp_path):
    file = tmp_path / owners.OWNER
    file.touch()
    os.utime(file, (1.0, 1.0))
    owners.claim(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()


def claim_together(folder):
    """Several processes take one dead owner's folder at once; which of them hold it when all have tried."""
    dist.init_process_group("gloo")
    dist.barrier()
    try:
        owners.claim(folder)
    except CheckpointError:
        holds = False
    else:
        holds = True
    dist.barrier()
    if holds:
        try:
            owners.check(folder)
        except CheckpointError:
            holds = False
    dist.barrier()
    dist.destroy_process_group()
    return holds


def test_of_several_that_take_over_one_gets_the_folder(tmp_path):
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        os.utime(of_another_machine(folder), (1.0, 1.0))
        assert sum(spawn(claim_together, 4, folder)) == 1


def test_a_job_that_is_restarted_goes_on_at_once(lingering, tmp_path):
    """The way of an elastic restart: the workers are ended, and others of the same job go on."""
    for _ in range(3):
        process = lingering(tmp_path, "numbered")
        process.send_signal(signal.SIGKILL)  # Still a zombie: nobody has waited for it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert [one.number for one in Naming(tmp_path).complete()] == [0, 1, 2]


def test_a_forked_child_does_not_write_in_its_parents_name(tmp_path):
    owners.claim(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            owners.claim(tmp_path)
        except CheckpointError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    owners.check(tmp_path)
