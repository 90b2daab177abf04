"""Every launcher starts it: ``drivetrain launch``, ``torchrun``, ``torch_xla.launch``; and the example is unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

import xla_jobs as jobs

from drivetrain_testing import spawn

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
CONFIG = EXAMPLES / "xla.yaml"
SCRIPT = Path(__file__).with_name("xla_script.py")
DRIVETRAIN = Path(sys.executable).with_name("drivetrain")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")

TOLERANCE = 2e-6
"""float32 losses of about 2.5, added by XLA and over processes in another order than by torch in one."""

SECONDS = 300
"""Of one command: eight on a quiet machine."""

pytestmark = pytest.mark.timeout(2 * SECONDS)


def run(*words: str | Path, **environment: str) -> None:
    """Run a command of this environment; its error output is the failure's."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "DRIVETRAIN_CONFIG_FILE": str(CONFIG), **environment}
    command = [sys.executable, *map(str, words)]
    ended = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def reference():
    return spawn(jobs.curve, 1, "single", {}, {})[0]


WAYS: dict[str, tuple[tuple[str | Path, ...], dict[str, str], int]] = {
    "python": ((SCRIPT,), {}, 1),
    "drivetrain": ((DRIVETRAIN, "launch", "--config", CONFIG, SCRIPT), {}, 1),
    "drivetrain-mesh": ((DRIVETRAIN, "launch", "--config", CONFIG, SCRIPT), {"CPU_NUM_DEVICES": "4"}, 1),
    "drivetrain-processes": ((DRIVETRAIN, "launch", "--config", CONFIG, "--num_processes", "2", SCRIPT), {}, 2),
    "torchrun": ((*TORCHRUN, "2", SCRIPT), {}, 2),
    "torch_xla.launch": ((SCRIPT, "--torch_xla"), {}, 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.gate("drivetrain", "drivetrain-mesh")
def test_every_launcher_gives_the_same_curve(reference, tmp_path, way):
    words, environment, world = WAYS[way]
    run(*words, tmp_path / "losses.json", **environment)
    found: dict[str, Any] = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    assert found["world"] == world
    assert found["losses"] == pytest.approx(reference, abs=TOLERANCE)


@pytest.mark.slow
def test_the_example_is_unchanged(tmp_path):
    """Handwritten digits, one epoch: AdamW magnifies the last place of the first update a little in each of 45."""
    curves = {}
    for name in ("single", "xla"):
        config = EXAMPLES / f"{name}.yaml"
        run(
            *(DRIVETRAIN, "launch", "--config", config, EXAMPLES / "digits.py"),
            *("--epochs", "1", "--output", tmp_path / name),
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curves[name] = [json.loads(line) for line in lines]
    losses = {name: [entry["loss"] for entry in curve if "loss" in entry] for name, curve in curves.items()}
    assert len(losses["xla"]) == 45
    assert losses["xla"] == pytest.approx(losses["single"], abs=2e-5)
    assert curves["xla"][-1] == curves["single"][-1], "the accuracy, counted over 357 test images"
