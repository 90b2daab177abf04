"""Scripts started the way a user starts them: through ``launch`` in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Launched = subprocess.CompletedProcess[str]

DRIVER = """
import sys
from drivetrain.config import load_config
from drivetrain.launch.script import launch
end = sys.argv.index("--")
overrides = dict(pair.split("=") for pair in sys.argv[1:end])
options = {word: True for word in ("module", "no_python") if overrides.pop(word, None)}
sys.exit(launch(load_config(overrides=overrides), sys.argv[end + 1 :], **options))
"""


def _clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without what a launcher would have set."""
    ours = ("DRIVETRAIN_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | added


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script into its own folder and return its path."""

    def write(source: str, name: str = "job.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(source))
        return path

    return write


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launched]:
    """``launch("num_processes=2", script, *arguments)`` in a fresh interpreter."""

    def run(settings: str, *command: object, **environment: str) -> Launched:
        return subprocess.run(
            [sys.executable, "-c", DRIVER, *settings.split(), "--", *map(str, command)],
            env=_clean_environment(**environment),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run


@pytest.fixture
def clean_environment() -> Callable[..., dict[str, str]]:
    """This process's environment without what a launcher would have set, and with what the caller adds."""
    return _clean_environment


@pytest.fixture
def launcher(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """As ``launch``, but returns the running process."""

    def start(settings: str, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, *settings.split(), "--", *map(str, command)],
            env=_clean_environment(),
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start
