"""The adapters with the real libraries: one run feeds all that are installed, each is then asked what it kept."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from drivetrain_trackers.plugin import TRACKERS

SCRIPT = """
import json, math, sys
import torch
from drivetrain import Accelerator

names = sys.argv[1:]
accelerator = Accelerator(cpu=True, log_with=names, project_dir="runs")
config = {"lr": 0.1, "optimizer": {"betas": [0.9, 0.99]}, "note": "x" * 7000}
accelerator.init_trackers("project", config=config, init_kwargs={
    "mlflow": {"run_name": "mine", "tags": {"kind": "test"}},
    "trackio": {"name": "mine", "auto_log_cpu": False},
    "wandb": {"mode": "offline", "name": "mine"},
})
assert [tracker.name for tracker in accelerator.trackers] == accelerator.log_with == names
group = {"a": 1, "b": torch.tensor(3)}
accelerator.log({"loss": torch.tensor(0.5), "norm": torch.tensor([2.0]), "group": group}, step=7)
accelerator.log({"loss": math.inf, "note": "hello"}, step=8)
raw = {name: accelerator.get_tracker(name, unwrap=True) for name in names}
found = {"types": {name: type(each).__name__ for name, each in raw.items()}}
if "wandb" in names:
    run = raw["wandb"]
    found["wandb"] = {"project": run.project, "name": run.name, "lr": run.config["lr"], "norm": run.summary["norm"]}
accelerator.end_training()
if "mlflow" in names:
    from mlflow import MlflowClient
    client, run_id = MlflowClient(), raw["mlflow"].info.run_id
    run = client.get_run(run_id)
    found["mlflow"] = {
        "name": run.info.run_name, "status": run.info.status, "kind": run.data.tags["kind"], "params": run.data.params,
        "experiment": client.get_experiment(run.info.experiment_id).name,
        "loss": [[point.step, point.value] for point in client.get_metric_history(run_id, "loss")],
        "metrics": sorted(run.data.metrics),
        "artifacts": [artifact.path for artifact in client.list_artifacts(run_id)],
    }
if "trackio" in names:
    from trackio.sqlite_storage import SQLiteStorage
    found["trackio"] = {"logs": SQLiteStorage.get_logs("project", "mine"), "config": dict(raw["trackio"].config)}
print(json.dumps(found))
"""
# Five libraries start in one process: 10 s of work, which a busy machine stretches.
pytestmark = pytest.mark.timeout(300)
LIBRARIES = ("mlflow", "tensorboard", "trackio", "wandb")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the libraries say that they kept, and the folder that the run wrote to."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    names = ["jsonl", *(name for name in LIBRARIES if importlib.util.find_spec(name))]
    ours = ("DRIVETRAIN_", "MLFLOW_", "TRACKIO_", "WANDB_", "RANK", "WORLD_SIZE", "LOCAL_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/runs.db", "TRACKIO_DIR": str(folder / "trackio")}
    environ |= {"WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "script.py", *names],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"types"')]
    return json.loads(lines[0]), folder, done.stderr


def needs(name):
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"the optional package {name} is not installed")


def test_jsonl(run):
    lines = (run[1] / "runs/project/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["loss"], first["norm"], first["group"]) == (7, 0.5, [2.0], {"a": 1, "b": 3})
    assert (second["step"], second["loss"], second["note"]) == (8, "inf", "hello")
    config = json.loads((run[1] / "runs/project/config.json").read_text(encoding="utf-8"))
    assert config["optimizer"] == {"betas": [0.9, 0.99]}


@needs("tensorboard")
def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run[1] / "runs/project"
    assert run[0]["types"]["tensorboard"] == "SummaryWriter"
    events = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 0.5), (8, math.inf)]
    assert events.Scalars("norm")[0].value == 2.0
    assert "note/text_summary" in events.Tags()["tensors"]
    assert EventAccumulator(str(folder / "group_b")).Reload().Scalars("group")[0].value == 3.0


@needs("wandb")
def test_wandb_offline(run):
    assert run[0]["types"]["wandb"] == "Run"
    # A step is complete for wandb when the next one begins.
    assert run[0]["wandb"] == {"project": "project", "name": "mine", "lr": 0.1, "norm": 2.0}
    assert len(list(run[1].rglob("*.wandb"))) == 1


@needs("mlflow")
def test_mlflow(run):
    found, _, told = run
    kept = found["mlflow"]
    assert found["types"]["mlflow"] == "ActiveRun"
    assert (kept["experiment"], kept["name"], kept["kind"], kept["status"]) == ("project", "mine", "test", "FINISHED")
    # The value that is too long for a parameter is in the artifact.
    assert kept["params"] == {"lr": "0.1", "optimizer.betas": "[0.9, 0.99]"}
    assert kept["artifacts"] == ["config.json"]
    assert kept["metrics"] == ["group/a", "group/b", "loss", "norm"]
    # An SQL database has no word for infinity: MLflow writes the largest number.
    assert kept["loss"] == [[7, 0.5], [8, sys.float_info.max]]
    assert "mlflow keeps numbers; note is a str and is left out." in told


@needs("trackio")
def test_trackio(run):
    assert run[0]["types"]["trackio"] == "Run"
    first, second = run[0]["trackio"]["logs"]
    assert (first["step"], first["loss"], first["norm"], first["group"]) == (7, 0.5, [2.0], {"a": 1, "b": 3})
    assert (second["step"], second["loss"], second["note"]) == (8, math.inf, "hello")
    assert run[0]["trackio"]["config"]["optimizer"] == {"betas": [0.9, 0.99]}


def test_each_library_is_an_extra_of_the_core():
    folders = (Path(__file__).parents[1], Path(__file__).parents[3] / "core")
    ours, core = (tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in folders)
    assert set(LIBRARIES) == TRACKERS.keys() == ours["project"]["optional-dependencies"].keys() - {"plot"}
    for name in (*LIBRARIES, "plot"):
        assert core["project"]["optional-dependencies"][name] == [f"drivetrain-trackers[{name}]>=0.1,<0.2"]
