"""Who is named first in a report: a rank that ended by itself, by whatever signal, and not who complained about it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from train_script import TRAIN

# Starts a launcher with several programs in each test; test_launch_local.py starts some too.
pytestmark = pytest.mark.slow

SETTINGS = "num_processes=2 use_cpu=true process_group.timeout_seconds=6"


@pytest.mark.parametrize("watched", ["false", "true"])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        # A second is enough for rank 0 to come to where it waits.
        ("time.sleep(1); os.kill(os.getpid(), signal.SIGTERM)", 143, "ended by signal 15 (SIGTERM)"),
        ("time.sleep(1); raise KeyboardInterrupt", 130, "ended by signal 2 (SIGINT)"),
    ],
)
def test_a_rank_that_is_told_to_end_by_somebody_else_is_the_first(launch, script, end, code, words, watched):
    done = launch(f"{SETTINGS} desync_watchdog={watched}", script(TRAIN.format(at=1, end=end)))
    ranks = [line for line in done.stderr.splitlines() if re.match(r"rank \d (failed|was|lost)", line)]
    assert ranks[0].startswith(f"rank 1 failed: {words} [host "), done.stderr
    assert ranks[0].endswith("last call: backward at job.py:9, its 5th]")
    # It may not have come so far yet, or be ending already because the connection is lost.
    assert re.search(r"^rank 0 .*last call: \w+ at job.py:(9|12|13), its [567]th\]$", ranks[1])
    assert done.returncode == code


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("raise KeyboardInterrupt", 130, "ended by signal 2 (SIGINT)"),
        ("sys.exit(3)", 3, "SystemExit: 3 (exit code 3)"),
    ],
)
def test_a_rank_that_takes_long_to_end_is_the_first_though_others_are_gone_before(launch, script, end, code, words):
    # Registered before the run, so called after the run has told the others of its end.
    lingers = "import atexit; atexit.register(time.sleep, 60 * int(os.environ['RANK']))"
    slow = TRAIN.replace("accelerator = Acc", f"{lingers}\n    accelerator = Acc")
    done = launch(f"{SETTINGS} desync_watchdog=true", script(slow.format(at=1, end=end)))
    ranks = [line for line in done.stderr.splitlines() if re.match(r"rank \d (failed|was)", line)]
    assert ranks[0].startswith(f"rank 1 failed: {words} [host "), done.stderr
    assert ranks[1].startswith("rank 0 failed too: drivetrain.errors.CollectiveMismatchError"), done.stderr
    assert done.returncode == code


def test_a_halted_rank_is_woken_to_be_stopped_and_says_where_it_was(launch, script):
    # The signal may halt it a moment later, hence the sleep.
    done = launch(SETTINGS, script(TRAIN.format(at=1, end="os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1)")))
    ranks = [line for line in done.stderr.splitlines() if re.match(r"rank \d (failed|was)", line)]
    assert ranks[0].startswith("rank 0 failed: RuntimeError: "), done.stderr
    assert "in gather at job.py:13" in ranks[0]
    # Killed after half a minute it would look like one that ran out of memory.
    assert ranks[1].startswith("rank 1 was stopped [host ")
    assert "at job.py:11; last call: backward at job.py:9" in ranks[1]
    assert "The others waited: rank 1 made fewer calls." in done.stderr
    assert done.returncode == 1


def test_a_function_that_was_stopped_has_not_ended_by_itself(script, clean_environment):
    path = script("""
        import os, time
        from drivetrain import debug_launcher
        def function():
            if os.environ["RANK"] == "1":
                raise ValueError("bang")
            time.sleep(60)
        if __name__ == "__main__":
            debug_launcher(function)
    """)
    done = subprocess.run(
        [sys.executable, path], env=clean_environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert "rank 1 failed: ValueError: bang" in done.stderr
    (stopped,) = [line for line in done.stderr.splitlines() if line.startswith("rank 0 was stopped [host ")]
    assert "; at job.py:7]" in stopped
