"""What an environment says that has the plugin for DeepSpeed and no DeepSpeed, or not even the plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Builds an environment, and starts Python in it for each line.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CURE = 'pip install "deepspeed>='


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(
        'from drivetrain import Accelerator\nAccelerator(config="train.yaml")\n', encoding="utf-8"
    )
    (folder / "train.yaml").write_text(
        "distributed_type: deepspeed\nuse_cpu: true\nnum_processes: 2\ndeepspeed: {zero_stage: 3}\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def bare(stranger):
    """Without DeepSpeed, which the environment would have from this one."""
    for entry in (stranger.folder / "lib").glob("python*/site-packages/deepspeed*"):
        entry.unlink()
    return stranger


def sentence(done):
    """The one line that says it; a script's own traceback may stand around it, a launcher's not."""
    assert done.returncode != 0
    assert done.args[0].endswith("python") or "Traceback" not in done.stdout + done.stderr
    (line,) = {line for line in done.stderr.splitlines() if "pip install" in line}
    return line


def test_without_the_plugin(bare, script):
    done = bare.run(["python", "train.py"], script, check=False)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert told
    assert all("deepspeed" in line and 'pip install "drivetrain[deepspeed]"' in line for line in told)


@pytest.fixture(scope="module")
def plugin(bare):
    bare.install(ROOT / "plugins/deepspeed")
    return bare


@pytest.mark.parametrize(
    "command", [["python", "train.py"], ["drivetrain", "launch", "--config", "train.yaml", "train.py"]]
)
def test_without_deepspeed_a_script_gets_one_sentence(plugin, script, command):
    said = sentence(plugin.run(command, script, check=False))
    assert "deepspeed" in said
    assert "(not installed)" in said
    assert CURE in said


def test_without_deepspeed_the_backends_are_listed(plugin, script):
    reports = json.loads(plugin.run(["drivetrain", "backends", "--json"], script).stdout)
    (report,) = [report for report in reports if report["name"] == "deepspeed"]
    assert not report["ready"]
    assert CURE in json.dumps(report).replace('\\"', '"')
    told = plugin.run(["drivetrain", "backends"], script).stdout
    assert "deepspeed" in told
    assert "not installed" in " ".join(told.split())
