"""What it costs to start: CPU time of whole programs, interpreter included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate, children

HELP = {"accelerate": "accelerate", "fabric": "fabric"}
MODULES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
PYTHON = "bare python"


def measure(what: str, rounds: int) -> dict[str, Samples]:
    """All contenders' ``"help"`` or ``"import"``; the unit is one start."""
    blocks = {PYTHON: _start(sys.executable, "-c", "pass")}
    if what == "help":
        blocks["drivetrain --help"] = _start(_script("drivetrain"), "--help")
        for name in peers.present():
            blocks[f"{name} --help"] = _start(_script(HELP[name]), "--help")
    else:
        blocks["import drivetrain"] = _start(sys.executable, "-c", "import drivetrain")
        blocks["import torch"] = _start(sys.executable, "-c", "import torch")
        for name in peers.present():
            blocks[f"import {MODULES[name]}"] = _start(sys.executable, "-c", f"import {MODULES[name]}")
    return alternate(blocks, units=1, rounds=rounds, warmup=1, meter=children)


def _script(name: str) -> str:
    """The program of this interpreter's environment."""
    return str(Path(sys.executable).parent / name)


def _start(*command: str) -> Block:
    # A terminal's width and colours are no part of it.
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "80"}

    def block() -> None:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return block
