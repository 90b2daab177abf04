"""Environments as strangers have them: of Drivetrain only the core and what is installed beside it from a folder."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Environment:
    """A virtual environment that has what this one has, but of Drivetrain only the core, built and copied.

    Made without a network: other people's packages are linked from this environment. Ours are installed as by anybody,
    so that a file missing from a wheel is missing here.
    """

    PIP = ("python", "-m", "pip", "install", "--quiet", "--no-index")

    def __init__(self, folder, *folders):
        self.folder = folder
        venv.create(folder, with_pip=False)
        (packages,) = (folder / "lib").glob("python*/site-packages")
        for kind in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(kind).iterdir():
                if "drivetrain" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
        if folders:
            self.install(*folders)

    def install(self, *folders):
        self.run([*self.PIP, "--no-deps", "--no-build-isolation", *folders], self.folder)

    def run(self, command, folder, *, limit=110, check=True):
        """Run one of the environment's programs in a folder."""
        environ = {name: each for name, each in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "PIP_"))}
        environ |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environ["PATH"] = f"{self.folder / 'bin'}:{environ['PATH']}"
        program, *rest = map(str, command)
        done = subprocess.run(
            [str(self.folder / "bin" / program), *rest],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=limit, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """An environment with the core alone, for the tests of one file."""
    return Environment(tmp_path_factory.mktemp("stranger") / "env", ROOT / "core")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment without anything of ours, for the tests of one file."""
    return Environment(tmp_path_factory.mktemp("stranger") / "env")
