"""What it costs to start: CPU time of whole programs, interpreter included, and how long a launch takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate, children

HELP = {"accelerate": "accelerate", "fabric": "fabric"}
MODULES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
PYTHON = "bare python"
PROCESSES = 2

_MOMENT = """
import sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{time.monotonic()}\\n")
"""
"""Writes the moment at which it runs, on a clock that all programs of a machine share."""

_MEETING = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""

_LEAVING = """
dist.destroy_process_group()
import os
os._exit(0)
"""
"""Without the second gloo's threads now and then abort a process that has finished, under every launcher."""

UNTIL = {"the first line of the script": _MOMENT, "the end of its first collective": _MEETING + _MOMENT + _LEAVING}
"""Scripts by the moment that they write down."""


def measure(what: str, rounds: int, warmup: int) -> dict[str, Samples]:
    """All contenders' ``"help"`` or ``"import"``; the unit is one start, and ``warmup`` rounds do not count."""
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
    return alternate(blocks, units=1, rounds=rounds, warmup=warmup, meter=children)


def launches(rounds: int, warmup: int, until: str) -> dict[str, Samples]:
    """Each launcher's way to one moment of :data:`UNTIL`, in its last process; CPU is the whole job's."""
    with tempfile.TemporaryDirectory() as folder:
        script, moments = Path(folder) / "script.py", Path(folder) / "moments"
        script.write_text(UNTIL[until], encoding="utf-8")
        job = (str(script), str(moments))
        blocks = {
            "torchrun": _start(_script("torchrun"), "--master-port=29641", f"--nproc-per-node={PROCESSES}", *job),
            "drivetrain launch": _start(_script("drivetrain"), "launch", "--cpu", f"--num_processes={PROCESSES}", *job),
        }
        if "accelerate" in peers.present():
            # With --cpu it starts one process, whatever was asked for; the script uses no device.
            flags = ("--multi_gpu", f"--num_processes={PROCESSES}", "--num_machines=1", "--mixed_precision=no")
            flags += ("--dynamo_backend=no", "--main_process_port=29642")
            blocks["accelerate launch"] = _start(_script("accelerate"), "launch", *flags, *job)

        def to_the_moment(block: Block) -> tuple[float, float]:
            moments.write_text("", encoding="utf-8")
            begun = time.monotonic()
            cpu, _ = children(block)
            seen = [float(line) for line in moments.read_text(encoding="utf-8").split()]
            assert len(seen) == PROCESSES, "a process of the launch wrote nothing"
            return cpu, max(seen) - begun

        return alternate(blocks, units=1, rounds=rounds, warmup=warmup, meter=to_the_moment)


def _script(name: str) -> str:
    """The program of this interpreter's environment."""
    return str(Path(sys.executable).parent / name)


def _start(*command: str) -> Block:
    # A terminal's width and colours are no part of it. A program finds its modules compiled, as after its first start.
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "80"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def block() -> None:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return block
