"""Ranks that wait for long are reported while they wait; and where each rank was when a run is stopped."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest

WAITING = """
    import sys, time, torch
    from drivetrain import Accelerator
    accelerator = Accelerator()
    seconds = float(sys.argv[1])
    for step in range(4):
        if step == 2 and accelerator.is_main_process:
            open("waiting", "w").close()
            if sys.argv[2] == "sleeps":
                time.sleep(seconds)
            begun, total = time.monotonic(), 0
            while time.monotonic() - begun < seconds and sys.argv[2] == "works":
                total += sum(range(100))
        accelerator.gather(torch.ones(1))
    accelerator.end_training()
"""
SETTINGS = "num_processes=2 use_cpu=true rank_monitor.interval_seconds=0.1 rank_monitor.standstill_seconds=1"


@pytest.mark.parametrize(
    ("how", "line", "word"),
    [("sleeps", r"at job\.py:10", "slow or stopped"), ("works", r"at job\.py:1[23], and works", "slow")],
)
@pytest.mark.gate("sleeps*")
def test_ranks_that_wait_are_told_for_whom_and_go_on(launch, script, how, line, word):
    done = launch(SETTINGS, script(WAITING), 12, how)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    begin = next(index for index, each in enumerate(lines) if each.startswith("rank 0 is waited for"))
    assert lines[begin] == f"rank 0 is waited for, for 1 s so far, and {word}:"
    assert re.fullmatch(rf"  rank 0: {line}; last call: gather at job\.py:14", lines[begin + 1]), lines
    assert lines[begin + 2] == "  rank 1: waits in gather at job.py:14; last call: gather at job.py:14"
    assert "process_group.timeout_seconds" in lines[begin + 3]


CROSSED = """
    import torch
    from torch import distributed as dist
    from drivetrain import Accelerator
    accelerator = Accelerator()
    accelerator.gather(torch.ones(1))
    if accelerator.is_main_process:
        dist.recv(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
"""


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_at_two_lines_are_told_so(launch, script):
    done = launch(f"{SETTINGS} process_group.timeout_seconds=6", script(CROSSED))
    assert done.returncode, done.stderr
    lines = done.stderr.splitlines()
    begin = next(index for index, each in enumerate(lines) if each.startswith("all ranks"))
    assert lines[begin].startswith("all ranks wait at different lines, for 1 s so far, most likely for each other")
    last = "last call: gather at job.py:6"
    assert lines[begin + 1] == f"  rank 0: waits in recv at job.py:8; {last}", lines
    assert lines[begin + 2] == f"  rank 1: waits in recv at job.py:10; {last}", lines


ONE_CALLS = """
    import torch
    from torch import distributed as dist
    from drivetrain import Accelerator
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
    dist.recv(torch.ones(1), 0)
"""


@pytest.mark.slow
def test_a_call_of_the_main_process_alone_is_no_wait_for_slow_ranks(launch, script):
    done = launch(f"{SETTINGS} process_group.timeout_seconds=10", script(ONE_CALLS))
    assert done.returncode, done.stderr
    lines = done.stderr.splitlines()
    # Early reports may be of ranks that were on their way.
    text = "all ranks wait at different lines, for 1 s so far, most likely for each other"
    begin = next(
        index
        for index, each in enumerate(lines)
        if each.startswith(text) and lines[index + 1].endswith("last call: gather at job.py:8")
    )
    assert "rank has made a call that others have not, as under `if accelerator.is_main_process:`" in lines[begin]
    assert lines[begin + 1] == "  rank 0: waits in gather at job.py:8; last call: gather at job.py:8", lines
    assert lines[begin + 2] == "  rank 1: waits in recv at job.py:9; last call: prepare at job.py:6", lines


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.gate("2")
def test_a_stopped_run_says_where_every_rank_was(launcher, script, tmp_path, how):
    process = launcher(SETTINGS, script(WAITING), 600, "sleeps")
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    time.sleep(1)  # until rank 1 waits
    process.send_signal(how)
    _, words = process.communicate(timeout=90)
    assert process.returncode == 128 + how
    host = socket.gethostname()
    assert words.splitlines()[-3:] == [
        f"rank 0 was stopped [host {host}; at job.py:10; last call: gather at job.py:14, its 2nd]",
        f"rank 1 was stopped [host {host}; in gather at job.py:14; last call: gather at job.py:14, its 3rd]",
        f"stopped by {how.name}; no worker is left",
    ]
