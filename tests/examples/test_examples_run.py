"""The examples train, resume elsewhere, and follow one curve under every backend."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_testing import spawn

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Same global batch everywhere: 32 images in a micro-batch of all ranks together.
ALONE = ["--batch_size", "32"]


def start(folder, config, script, *arguments):
    command = [str(BIN / "drivetrain"), "launch", "--config", f"{ROOT}/examples/{config}.yaml"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"{ROOT}/examples/{script}.py", *arguments],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script_in_rank(folder, script, words):
    """One rank of what the launcher would start; what it prints."""
    os.chdir(folder)
    sys.argv[:] = [script, *words]
    sys.path.insert(0, f"{ROOT}/examples")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(f"{ROOT}/examples/{script}.py", run_name="__main__")
    return printed.getvalue()


def forked(folder, config, world, script, *arguments):
    """As :func:`start`, by ranks that are forked: they need not import torch anew."""
    file = {"DRIVETRAIN_CONFIG_FILE": f"{ROOT}/examples/{config}.yaml"}
    return spawn(script_in_rank, world, folder, script, arguments, env=file, timeout=100)[0]


def metrics(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder, name):
    return {line["update"]: line["loss"] for line in metrics(folder, name) if "loss" in line}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Digits for two epochs under ddp: the folder it ran in, and what it printed."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, start(folder, "ddp", "digits", "--epochs", "2")


@pytest.mark.slow
def test_it_ends_with_accuracy_checkpoint_and_picture(two_processes):
    folder, printed = two_processes
    told = dict(line.split(":", 1) for line in printed.splitlines()[-3:])
    assert float(told["test accuracy"].strip(" %")) > 30
    assert (folder / told["checkpoint"].strip() / "manifest.json").is_file()
    assert (folder / told["picture"].strip()).read_bytes().startswith(b"\x89PNG")
    assert printed.count("epoch  1 of 2") == 1


@pytest.fixture(scope="module", params=["single", "dp"])
def one_process(request, two_processes, tmp_path_factory):
    """The same under a backend of one process, in a folder that has that run already."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(two_processes[0] / "runs", folder / "runs")
    (folder / "runs/digits/mine.txt").write_text("kept", encoding="utf-8")
    return folder, forked(folder, request.param, 1, "digits", "--epochs", "2", *ALONE)


@pytest.mark.slow
def test_every_backend_follows_one_curve(two_processes, one_process):
    # float32 sums in another order, over 46 updates.
    assert losses(one_process[0], "runs/digits") == pytest.approx(losses(two_processes[0], "runs/digits"), abs=1e-3)


@pytest.mark.slow
def test_an_earlier_run_is_moved_aside(one_process):
    folder, printed = one_process
    assert printed.startswith("The run that was in runs/digits is now in runs/digits-1.")
    assert (folder / "runs/digits-1/mine.txt").read_text(encoding="utf-8") == "kept"


@pytest.mark.slow
def test_a_run_goes_on_under_another_backend(two_processes):
    folder, _ = two_processes
    whole = losses(folder, "runs/digits")
    resumed = ["--resume", "runs/digits/checkpoints/checkpoint_0"]
    forked(folder, "single", 1, "digits", "--epochs", "2", *ALONE, *resumed)
    assert losses(folder, "runs/digits") == pytest.approx(whole, abs=1e-3)


@pytest.mark.slow
def test_the_language_model_learns(tmp_path):
    small = ["--kilobytes", "64", "--epochs", "2", "--channels", "32", "--layers", "2", "--heads", "2"]
    printed = forked(tmp_path, "ddp", 2, "language_model", *small)
    bits = [line["bits_per_byte"] for line in metrics(tmp_path, "runs/language_model") if "bits_per_byte" in line]
    assert bits[1] < bits[0] < 8
    assert f"bits per byte: {bits[1]:.3f}" in printed


@pytest.mark.slow
def test_more_epochs_than_were_planned_are_refused_with_what_to_do(two_processes):
    folder, _ = two_processes
    command = [str(BIN / "drivetrain"), "launch", "--config", f"{ROOT}/examples/ddp.yaml", f"{ROOT}/examples/digits.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--epochs", "3", "--resume"],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "The run was planned for 46 updates, after which its learning rate is 0, and 69 are asked for" in done.stderr
    assert "Traceback" not in done.stderr
