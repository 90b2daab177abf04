"""The command line as a user runs it: a fresh process, nothing on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Done = subprocess.CompletedProcess[str]
OURS = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_")


@pytest.fixture
def drivetrain(tmp_path: Path) -> Callable[..., Done]:
    """``drivetrain("launch", "script.py")`` in an empty folder, with only the environment that is given."""

    def run(*arguments: object, answers: str = "", **environment: str) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        return subprocess.run(
            [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)],
            env={**clean, **environment},
            cwd=tmp_path,
            input=answers,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
