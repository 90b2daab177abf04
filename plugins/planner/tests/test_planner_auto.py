"""``distributed_type: auto``, through the command line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from drivetrain.api import UsageError
from drivetrain.api.programs import load_config
from drivetrain_planner.auto import chosen
from drivetrain_planner.choosing import check_mesh

TRAIN = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def batch():
    return torch.ones(4, 8)


def loss(output, batch):
    return output.pow(2).mean()


if __name__ == "__main__":
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss(model(batch()), None))
    optimizer.step()
    accelerator.print(f"trained by {accelerator.distributed_type} over {accelerator.num_processes}")
    accelerator.end_training()
"""

CONFIG = """
distributed_type: auto
num_processes: 2
use_cpu: true
plan: {model: "train.py:make", batch: "train.py:batch", loss: "train.py:loss", optimizer: SGD}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"cp": 2}, "no installed backend has the mesh axis cp, so that no layout with it can be planned"),
        ({"tp": 2}, "names mesh: {tp: 2}, and the planner chooses the sizes of these axes"),
    ],
)
def test_an_axis_that_the_planner_does_not_read_is_refused(mesh, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        check_mesh(mesh)


def test_axes_of_replicas_and_shards_are_the_backends():
    check_mesh({"dp_shard": 2, "tp": 1})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("distributed_type: ", "type: "), r"train\.auto\.yaml names no distributed_type\. Remove it to choose again"),
        (("distributed_type: ", "distributed_type: ["), r"train\.auto\.yaml cannot be read: .*\. Remove it to choose"),
    ],
)
def test_a_kept_choice_that_says_nothing_is_refused_until_it_is_removed(folder, monkeypatch, changed, told):
    monkeypatch.chdir(folder)
    resolved = load_config("config.yaml", environ={})
    first = chosen(resolved)
    kept = folder / "train.auto.yaml"
    kept.write_text(kept.read_text().replace(*changed))
    with pytest.raises(UsageError, match=re.compile(told, re.DOTALL)):
        chosen(resolved)
    kept.unlink()
    assert chosen(resolved) == chosen(resolved) == first


def launch(folder, *arguments):
    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "launch", *arguments, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(400)
def test_a_launch_chooses_once_and_keeps_the_choice(folder):
    first = launch(folder, "--config", "config.yaml")
    assert first.returncode == 0, first.stderr
    assert "->  ddp" in first.stderr
    assert "distributed_type: auto is train.auto.yaml; keep it, or remove it." in first.stderr
    assert "over 2" in first.stdout
    assert load_config(folder / "train.auto.yaml").config.distributed_type == "ddp"
    text = (folder / "train.auto.yaml").read_text().replace("distributed_type: ddp", "distributed_type: fsdp")
    (folder / "train.auto.yaml").write_text(text)
    again = launch(folder, "--config", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert "which an earlier launch has chosen" in again.stderr
    assert "fsdp" in again.stdout.lower()
    other = launch(folder, "--config", "config.yaml", "--num_processes", "3")
    assert other.returncode != 0
    assert "than the configuration describes now (num_processes is 3, and was 2)" in other.stderr


def test_a_configuration_without_a_model_says_what_to_write(folder):
    (folder / "config.yaml").write_text("distributed_type: auto\nuse_cpu: true\nnum_processes: 2\n")
    done = launch(folder, "--config", "config.yaml")
    assert done.returncode != 0
    assert "Write plan: {model: train.py:make_model" in done.stderr


def test_a_script_that_was_not_launched_says_so(folder):
    command = [sys.executable, "-c", "from drivetrain import Accelerator; Accelerator(config='config.yaml')"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert "distributed_type: auto is replaced by a backend in `drivetrain launch`" in done.stderr
