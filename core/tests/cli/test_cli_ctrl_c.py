"""Ctrl-C before anything was started: the exit code is that of any other Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import drivetrain.cli.launch
def interrupted(*_, **__):
    raise KeyboardInterrupt
drivetrain.cli.launch.resolve = interrupted
from drivetrain.cli.main import main
main(["launch", "--print", "train.py"])
"""


def test_while_the_configuration_is_read():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 130
    assert done.stderr == "stopped by SIGINT\n"
