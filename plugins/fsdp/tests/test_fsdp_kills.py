"""The real launcher and its agent are killed at random points of sharded saves: the newest complete checkpoint loads.

Hundreds of kills of ranks and of a plain launcher are in the core's tests; here is torch's own agent, whose starts cost
seconds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("agent_jobs.py")
WORLDS = [2, 3, 1]


def start(folder: Path, world: int, *more: str) -> subprocess.Popen[str]:
    command = [Path(sys.executable).with_name("drivetrain"), "launch", "--distributed_type", "fsdp", "--cpu"]
    command += ["--num_processes", str(world), SCRIPT, folder, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)


def said(job: subprocess.Popen[str], word: str) -> int:
    """The number on the next line that begins with this word."""
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith(word):
            return int(line.split()[1])
    raise AssertionError(f"the job ended before it said {word!r}")


@pytest.mark.slow
def test_a_killed_agent_leaves_a_checkpoint_that_the_next_job_goes_on_from(tmp_path: Path) -> None:
    saved = -1
    for number, world in enumerate(WORLDS):
        chance = random.Random(number)
        with start(tmp_path, world) as job:
            resumed = said(job, "resumed")
            assert resumed >= saved, "what was said to be saved is there, in another world too"
            for _ in range(chance.randrange(2, 5)):
                saved = said(job, "saved")
            # A save in the background may not be finished; the one before it is.
            saved -= saved % 2
            time.sleep(chance.uniform(0, 0.05))
            job.send_signal(signal.SIGKILL)
            # The pipe ends when the last of its ranks has ended.
            for line in job.stdout or ():
                if line.startswith("saved"):
                    saved = int(line.split()[1]) // 2 * 2
    with start(tmp_path, 2, "load") as job:
        assert said(job, "resumed") >= saved
        assert job.wait(timeout=180) == 0
