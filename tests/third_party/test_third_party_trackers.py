"""A stranger's package that brings a tracker and observers, made of the blocks of the pages about them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

# Builds an environment, and starts Python in it for each line.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def blocks(page):
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


SCRIPT, *_ = blocks("trackers.md")
OWN, HOOK, OBSERVER = blocks("write-a-tracker.md")
CLASS, USE = OWN.split("\n\naccelerator = ")

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "drivetrain-ledger"
version = "3.1"

[project.entry-points."drivetrain.hooks"]
prepared = "drivetrain_ledger.plugin"
step_ended = "drivetrain_ledger.plugin"
trackers = "drivetrain_ledger.plugin"

[tool.hatch.build.targets.wheel]
packages = ["drivetrain_ledger"]
"""

FAILING = """

@hookimpl
def drivetrain_prepared(accelerator, objects):
    raise RuntimeError("no paper left")
"""


@pytest.fixture(scope="module")
def stranger(stranger, tmp_path_factory):
    """An environment with the core and the package."""
    folder = tmp_path_factory.mktemp("ledger")
    package = folder / "drivetrain_ledger"
    package.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (package / "__init__.py").touch()
    (package / "ledger.py").write_text(CLASS, encoding="utf-8")
    observer = OBSERVER.replace("from drivetrain.api import hookimpl\n", "")
    (package / "plugin.py").write_text(HOOK + observer + FAILING, encoding="utf-8")
    stranger.install(folder)
    return stranger


def test_the_pages_own_tracker_keeps_what_is_logged(stranger, tmp_path):
    (tmp_path / "own.py").write_text(f"{CLASS}\n\naccelerator = {USE}", encoding="utf-8")
    stranger.run(["python", "own.py"], tmp_path)
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "* None {'lr': 0.1}\n* 1 {'loss': 0.5}\n"


def test_a_plugins_tracker_is_asked_for_by_name_and_its_failing_observer_stops_nothing(stranger, tmp_path):
    assert 'log_with="jsonl", project_dir="runs"' in SCRIPT
    script = SCRIPT.replace('log_with="jsonl"', 'log_with=["jsonl", "ledger"]')
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    told = stranger.run(["python", "train.py"], tmp_path).stderr
    lines = (tmp_path / "runs/demo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    assert [line["step"] for line in logged if "loss" in line] == [0, 1, 2]
    # The page's observer logs the number of each step, which began to count at 1.
    assert [line["step"] for line in logged if "loss" not in line] == [1, 2, 3]
    assert (tmp_path / "runs/demo.txt").read_text(encoding="utf-8").startswith("- None {'lr': 0.1}\n- 1 {'step': 1}\n")
    assert "plugin drivetrain-ledger (drivetrain-ledger 3.1) failed in drivetrain_prepared" in told
    assert "RuntimeError: no paper left" in told


def test_an_unknown_tracker_is_guessed_among_all(stranger, tmp_path):
    script = "from drivetrain import Accelerator\nAccelerator(log_with='legder', project_dir='.')\n"
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = stranger.run(["python", "train.py"], tmp_path, check=False)
    assert "no tracker is called 'legder'" in done.stderr
    assert "Did you mean 'ledger'?" in done.stderr
