"""Tests depend on nothing around them: a sample of the gate passes from whatever shell and folder it is started."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# The sample is in the gate itself; here it runs three times more.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = [
    "core/tests/cli/test_cli_main.py",
    "core/tests/config/test_config_mistakes.py",
    "core/tests/launch/test_launch_local.py::test_what_is_told_to_ignore_hangups_does",
    "core/tests/checkpoint/test_checkpoint_portable.py",
    "kit/tests/test_testing_spawn.py",
    "plugins/ddp/tests/test_ddp_conformance.py::test_conformance[gradients.dense-2]",
    "tests/house/test_house_text.py",
]
"""Programs on a terminal, files, signals, ports, ranks, languages: what could notice where it runs."""

FOREIGN = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "2", "PMI_RANK": "2",
    "OMP_NUM_THREADS": "7", "KMP_AFFINITY": "compact", "NO_COLOR": "1", "COLUMNS": "40", "LINES": "10",
    "TZ": "Pacific/Apia", "LC_ALL": "C", "PYTHONHASHSEED": "11", "EDITOR": "vi",
}  # fmt: skip


def sample(tmp_path, *options, environ=None, by=(), **how):
    """Run the sample in a process of its own, started otherwise than usual, and by another program if one is named."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    home = tmp_path / "home"
    home.mkdir()
    settings |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **(environ or {})}
    command = [*by, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *SAMPLE]
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            check=False, **how,
        )  # fmt: skip
        output.seek(0)
        assert done.returncode == 0, output.read()[-6000:]


def ignoring_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)


@pytest.mark.timeout(900)
def test_under_a_cluster_without_a_terminal(tmp_path):
    """Variables of clusters, another language and time zone, hangups ignored, no terminal, files for nobody else."""
    sample(tmp_path, environ={**FOREIGN, "CI": "true"}, preexec_fn=ignoring_hangups, start_new_session=True)


@pytest.mark.timeout(900)
def test_in_random_order_with_odd_folders(tmp_path):
    """``TMPDIR`` with a space, no ``CI``; pytest-random-order prints its seed."""
    # Not in the test's own folder: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="a folder ") as odd:
        sample(tmp_path, "--random-order", environ={"TMPDIR": odd, "CI": ""})


@pytest.mark.timeout(900)
def test_without_write_access_to_the_working_folder(tmp_path):
    """A read-only folder beside the tests' own."""
    beside = tmp_path / "read only"
    beside.mkdir()
    beside.chmod(stat.S_IRUSR | stat.S_IXUSR)
    sample(tmp_path, environ={"XDG_CONFIG_HOME": str(beside)})


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="this run is not root's in the first place")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, of util-linux")
@pytest.mark.timeout(900)
def test_without_the_rights_of_root(tmp_path):
    """Permissions of files hold, as for every other user; elsewhere in this file the sample runs as whoever runs it."""
    sample(tmp_path, by=("setpriv", "--bounding-set=-all", "--inh-caps=-all"))
