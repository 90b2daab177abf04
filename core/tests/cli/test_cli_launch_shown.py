"""``drivetrain launch --print``: what is shown is what would run."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

# Starts a launcher with several programs in each test; test_launch_local.py starts some too.
pytestmark = pytest.mark.slow

WORKER = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"


def script(folder: Path, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(WORKER)
    return path


def test_print_shows_every_machine_and_runs_nothing(drivetrain, tmp_path):
    job = script(tmp_path)
    done = drivetrain(
        "launch", "--print", "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.0.0.1",
        "--gpu_ids", "1,0", "--cpu", str(job), f"{tmp_path}/rank", "--num_machines", "of the script",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("drivetrain")]
    assert [words[words.index("--machine_rank") + 1] for words in commands] == ["0", "1"]
    assert all(words[-4:] == [str(job), f"{tmp_path}/rank", "--num_machines", "of the script"] for words in commands)
    assert "# machine 1 of 2: ranks 2 to 3 of 4" in done.stdout
    assert "export CUDA_VISIBLE_DEVICES=1,0" in done.stdout
    assert "at 10.0.0.1, port 29500" in done.stdout
    assert not list(tmp_path.glob("rank*"))


def test_what_is_shown_for_a_worker_runs_as_it_stands(drivetrain, tmp_path):
    job = script(tmp_path)
    shown = drivetrain("launch", "--print", "--cpu", "--num_processes", "2", str(job), f"{tmp_path}/rank").stdout
    lines = shown.splitlines()
    exports = [line for line in lines if line.startswith("export ")]
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    subprocess.run(["bash", "-c", "\n".join([*exports, lines[-1]])], env=environ, check=True, timeout=180)
    assert (tmp_path / "rank1").read_text() == "2"
