"""The tutorial goes as it says, and its numbers and pictures are those that its commands give."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain_testing import spawn

# Three processes and an import of torch in each: 10 s on a quiet machine, many times that on a busy one.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs/tutorial"
RUNS = json.loads((TUTORIAL / "pictures/runs.json").read_text(encoding="utf-8"))


def blocks(name, language):
    text = (TUTORIAL / name).read_text(encoding="utf-8")
    return re.findall(rf"^(<!-- not run[^\n]*\n)?```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def bodies(name, language):
    return [body for skipped, body in blocks(name, language) if not skipped]


def run(command, folder):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_first_run(tmp_path):
    plain, prepared = bodies("first-run.md", "python")
    (tmp_path / "plain.py").write_text(plain, encoding="utf-8")
    (tmp_path / "train.py").write_text(prepared, encoding="utf-8")
    (tmp_path / "train.yaml").write_text(bodies("first-run.md", "yaml")[0], encoding="utf-8")
    shown, *again = bodies("first-run.md", "text")
    assert again == [shown]
    commands = "".join(bodies("first-run.md", "sh")).splitlines()
    assert len(commands) == 3
    for command in ("python plain.py", *commands):
        assert run(command, tmp_path) == shown, command


def test_as_many_lines_differ_as_the_page_says():
    plain, prepared = (body.splitlines() for body in bodies("first-run.md", "python"))
    changed = [line for line in difflib.ndiff(plain, prepared) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) == 6
    assert "Six lines differ" in (TUTORIAL / "first-run.md").read_text(encoding="utf-8")


def configurations():
    """The file of the page as each of its changes leaves it, by backend."""
    first, *changes = map(yaml.safe_load, bodies("one-line.md", "yaml"))
    return {each["distributed_type"]: {**first, **each} for each in (first, *changes)}


def test_one_line_changes_and_one_more_for_a_pipeline():
    changes = bodies("one-line.md", "yaml")[1:]
    assert [len(change.splitlines()) for change in changes] == [1, 1, 2]
    assert set(configurations()) == set(RUNS) - {"single"}


def script_in_rank(folder, words):
    """One rank of what ``drivetrain launch`` would start: ranks that are forked need not import torch anew."""
    os.chdir(folder)
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(configurations()))
def test_a_run_is_the_one_that_the_pictures_show(backend, tmp_path, capsys):
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(configurations()[backend]), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (command,) = bodies("one-line.md", "sh")
    start = "drivetrain launch --config train.yaml "
    assert command.startswith(start)
    if backend == "ddp":
        printed = run(command, tmp_path)
    else:
        file = {"DRIVETRAIN_CONFIG_FILE": str(tmp_path / "train.yaml")}
        spawn(script_in_rank, 2, tmp_path, command.removeprefix(start).split(), env=file, timeout=200)
        printed = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "runs/digits/metrics.jsonl").read_text().splitlines()]
    # Another machine and another release of torch add float32 in another order, over 69 updates.
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(RUNS[backend]["losses"], abs=2e-3)
    assert [line["accuracy"] for line in lines if "accuracy" in line][-1] == pytest.approx(
        RUNS[backend]["accuracy"], abs=0.01
    )
    assert "picture:" in printed


def test_the_numbers_say_what_the_page_says():
    alone = RUNS["single"]["losses"]
    for name, numbers in RUNS.items():
        # What the page calls float32 sums in another order.
        assert numbers["losses"] == pytest.approx(alone, abs=1e-6), name
    (whole,) = RUNS["single"]["memory"]
    parameters = 4 * 14.4e6
    assert whole == pytest.approx(4 * parameters, rel=0.01)
    assert RUNS["ddp"]["memory"] == pytest.approx([whole] * 2, rel=0.01)
    assert RUNS["fsdp"]["memory"] == pytest.approx([whole / 2] * 2, rel=0.01)
    # Parameters whole, of which the master values are a view in float32; moments cut; gradients gone after the step.
    assert RUNS["deepspeed"]["memory"] == pytest.approx([parameters + 2 * parameters / 2] * 2, rel=0.02)
    # Both ranks together hold the model once, and nothing but buffers twice.
    assert sum(RUNS["megatron"]["memory"]) == pytest.approx(whole, rel=0.06)
