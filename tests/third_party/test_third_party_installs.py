"""A stranger's package, installed from its folder into an environment without our other plugins, and tested there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

# Builds an environment, and starts Python in it for each line.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples/third_party/diloco"
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stranger(stranger):
    """An environment with the core, the kit and the package."""
    stranger.install(ROOT / "kit", PACKAGE)
    return stranger


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_it_is_found_beside_the_reference_backend_alone(stranger, tmp_path):
    reports = json.loads(stranger.run(["drivetrain", "backends", "--json"], tmp_path).stdout)
    assert {report["name"]: report["distribution"] for report in reports} == {
        "diloco": "drivetrain-diloco",
        "single": "drivetrain",
    }
    assert all(report["ready"] for report in reports)


def test_a_backend_that_is_not_there_is_told_with_its_cure(stranger, tmp_path):
    (tmp_path / "script.py").write_text("from drivetrain import Accelerator\nAccelerator()\n", encoding="utf-8")
    (tmp_path / "train.yaml").write_text("distributed_type: ddp\n", encoding="utf-8")
    command = ["drivetrain", "launch", "--config", "train.yaml", "script.py"]
    done = stranger.run(command, tmp_path, check=False)
    assert done.returncode != 0
    assert 'pip install "drivetrain[ddp]"' in done.stdout + done.stderr


def test_its_readme_works_as_it_stands(stranger, tmp_path):
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "train.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    launch, traffic = blocks("sh")[0].splitlines()
    told = stranger.run(launch.split(), tmp_path).stdout
    losses = [float(value) for value in re.findall(r"^epoch \d loss ([\d.]+)$", told, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    (file,) = (tmp_path / "runs").rglob("*.jsonl")
    logged = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["diloco/round"] for line in logged if "diloco/round" in line] == list(range(1, 11))
    manifest = json.loads((tmp_path / "runs/last/manifest.json").read_text(encoding="utf-8"))
    assert manifest["backend"] == "diloco"
    assert "rounds of 500" in stranger.run(traffic.split(), tmp_path).stdout


@pytest.mark.timeout(900)
def test_its_own_tests_pass(stranger):
    """The conformance kit, the cases that hold in rounds, and the rounds themselves."""
    command = ["python", "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    told = stranger.run(command, PACKAGE, limit=880).stdout
    for path in PACKAGE.glob("tests/test_*.py"):
        assert re.search(rf"^tests/{path.name} [.x]+", told, re.MULTILINE), told
    assert re.search(r"\d+ passed", told)
