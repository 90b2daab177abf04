"""Options of ``drivetrain launch`` that another distribution of ours is needed for, where it is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain.registry import pip_line


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformers", ["--trainer"]),
        ("clusters", ["--slurm", "job.sbatch"]),
        ("clusters", ["--kubernetes", "job.yaml", "--image", "registry/train:1"]),
    ],
)
def test_it_says_what_to_type(name, options):
    code = (
        f"import sys; sys.modules['drivetrain_{name}'] = None\n"
        "from drivetrain.cli.main import main\n"
        f"main(['launch', '--cpu', *{options}, 'train.py'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    what = f"{options[0]} needs drivetrain-{name}, which is not installed"
    assert done.stderr == f"error: {what}. Run: {pip_line(name)}\n"
