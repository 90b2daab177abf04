"""The report of a rank that dies or hangs: which, on which host, its last call, and where the others were."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from train_script import TRAIN

from drivetrain.launch.failures import read_workers, script_line
from drivetrain.launch.worker import LAST_CALL

# Starts a launcher with several programs in each test; test_launch_local.py starts some too.
pytestmark = pytest.mark.slow

SETTINGS = "num_processes=2 use_cpu=true process_group.timeout_seconds={timeout}"


@pytest.mark.parametrize(
    ("end", "code", "fate"),
    [
        # A second is enough for rank 0 to come to where it waits.
        ("time.sleep(1); os.kill(os.getpid(), 9)", 137, "rank 1 failed: ended by signal 9 (SIGKILL)"),
        ("time.sleep(1); os._exit(9)", 9, "rank 1 failed: exit code 9"),
        ("time.sleep(300)", 1, "rank 1 was stopped"),
    ],
)
def test_one_report_says_who_where_and_after_which_call(launch, script, tmp_path, end, code, fate):
    # The hanging rank is found out by the time-out of the process group, the dead ones at once.
    # In a folder that is named as our packages are.
    (tmp_path / "drivetrain_demo").mkdir()
    path = script(TRAIN.format(at=2, end=end), "drivetrain_demo/job.py")
    done = launch(SETTINGS.format(timeout=8) + f" project_dir={tmp_path / 'out'}", path)
    assert done.returncode == code, done.stderr
    host = socket.gethostname()
    (mine,) = [line for line in done.stderr.splitlines() if line.startswith("rank 1 ")]
    assert mine.startswith(f"{fate} [host {host}; ")
    # Three calls a step: backward, step, gather.
    assert mine.endswith("last call: backward at job.py:9, its 8th]")
    assert ("at job.py:11" in mine) == (end == "time.sleep(300)")
    (other,) = [line for line in done.stderr.splitlines() if line.startswith("rank 0 ")]
    waits = f"[host {host}; in gather at job.py:13; last call: gather at job.py:13, its 10th]"
    if end == "time.sleep(300)":
        assert other.endswith(waits)
    else:  # it may not have come so far yet, or be ending already because the connection is lost
        assert re.search(rf"\[host {host}; .*last call: \w+ at job.py:(9|12|13), its (8|9|10)th\]$", other)
    assert ("rank 1 made fewer calls" in done.stderr) == (end == "time.sleep(300)")
    report = Path(re.search(r"^(?:The report|With the stacks? of rank [01, ]+): (.*)", done.stderr, re.MULTILINE)[1])
    assert report.parent == tmp_path / "out"
    assert mine in report.read_text()
    assert done.stderr.count("Traceback") <= 1


def test_a_rank_that_had_ended_is_not_forgotten(launch, script):
    path = script("""
        import os, time
        if os.environ["RANK"] == "0":
            time.sleep(1)
            raise ValueError("bang")
    """)
    done = launch("num_processes=2", path)
    assert re.search(r"rank 0 failed: ValueError: bang .*\nrank 1 had ended \[host ", done.stderr), done.stderr


STACK = """\
  File "/usr/lib/python3.11/threading.py", line 5 in wait
  File "{ours}/distributed/nested.py", line 60 in gather
  File "{ours}/accelerator.py", line 70 in gather
  File "/home/me/eval.py", line 88 in evaluate
  File "/home/me/train.py", line 10 in <module>
  File "{ours}/launch/worker.py", line 50 in run
"""


def test_the_place_is_the_scripts_line_and_what_it_called():
    import drivetrain

    ours = Path(drivetrain.__file__).parent
    stack = STACK.format(ours=ours)
    assert script_line(stack, newest_first=True) == "in gather at eval.py:88"
    alone = '  File "/home/me/eval.py", line 88 in evaluate\n  File "/home/me/train.py", line 10 in <module>\n'
    assert script_line(alone, newest_first=True) == "at eval.py:88"
    assert script_line(alone.replace("/me/", "/me/drivetrain_demo/"), newest_first=True) == "at eval.py:88"
    trace = '  File "train.py", line 10, in <module>\n    run()\n  File "/home/me/eval.py", line 88, in evaluate\n'
    assert script_line(trace) == "at eval.py:88"
    assert script_line("") == ""
    imports = f"""\
  File "{ours}/__init__.py", line 9 in __getattr__
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "/home/me/train.py", line 3 in <module>
"""
    assert script_line(imports, newest_first=True) == "in import at train.py:3"


def test_a_record_that_is_being_written_counts_as_none(tmp_path):
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / LAST_CALL).write_bytes(b"\0" * 12)
    assert read_workers(tmp_path) == {}


@pytest.mark.parametrize(
    ("message", "shown", "kept"),
    [
        ("'half ' + chr(0xd83d) + ' a pair'", r"half \\ud83d a pair", r"half \ud83d a pair"),
        ("'x' * 1_000_000", r"x{400,500}\.\.\. \(1,000,0\d\d characters\)", "x" * 1_000_000),
        ("'\\n'.join(map(str, range(200_000)))", r"ValueError: 0 .*", "\n199999\n"),
    ],
    ids=["half a surrogate pair", "one long line", "many lines"],
)
def test_a_message_that_nobody_can_read_is_cut_and_kept_in_the_file(launch, script, tmp_path, message, shown, kept):
    path = script(f"""
        import os
        if os.environ["RANK"] == "1":
            raise ValueError({message})
    """)
    done = launch(f"num_processes=2 project_dir={tmp_path / 'out'}", path)
    assert done.returncode == 1, done.stderr[:5000]
    assert re.search(rf"^rank 1 failed: .*{shown}", done.stderr, re.MULTILINE), done.stderr[:5000]
    assert "Traceback" in done.stderr
    assert len(done.stderr) < 20_000
    report = Path(re.search(r"^(?:The report|With the stacks? of rank [01, ]+): (.*)", done.stderr, re.MULTILINE)[1])
    assert kept in report.read_text(encoding="utf-8")


def test_a_note_of_an_exception_does_not_stand_for_its_message(launch, script):
    path = script("""
        error = ValueError("bang")
        error.add_note("a remark")
        raise error
    """)
    done = launch("num_processes=1", path)
    assert "a remark\nrank 0 failed: ValueError: bang" in done.stderr


PART = """
    import sys, torch
    from torch import nn
    from drivetrain import Accelerator

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)

        def forward(self, x, high):
            return (self.high if high else self.low)(self.body(x))

    accelerator = Accelerator()
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(30):
        if sys.argv[1] == "ends" and step == 25 and accelerator.process_index == 1:
            sys.exit(0)
        if sys.argv[1] == "none" and step == 25 and accelerator.process_index == 1:
            import time
            time.sleep(60)
        high = sys.argv[1] == "other" and step == 25 and accelerator.process_index == 1
        accelerator.backward(model(torch.ones(2, 8), high).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("fsdp", "other"),
        ("deepspeed deepspeed.zero_stage=2", "other"),
        ("deepspeed deepspeed.zero_stage=3", "other"),
        ("ddp", "none"),
        ("fsdp", "none"),
    ],
)
def test_ranks_that_part_after_the_compared_steps_are_told_why(launch, script, backend, how):
    pytest.importorskip(f"drivetrain_{backend.split()[0]}")
    settings = SETTINGS.format(timeout=6) + f" distributed_type={backend}"
    done = launch(settings, script(PART), how)
    assert done.returncode, done.stderr
    # Some engines still compare what they do then.
    assert "ranks have not run the same submodules" in done.stderr
    assert "Run every submodule on every rank" in done.stderr


def test_a_rank_that_ended_without_an_error_is_the_cause(launch, script):
    pytest.importorskip("drivetrain_ddp")
    done = launch(SETTINGS.format(timeout=20) + " distributed_type=ddp", script(PART), "ends")
    assert done.returncode, done.stderr
    assert "Rank 1 had ended without an error while rank 0 still trained." in done.stderr
    assert "Likely cause" not in done.stderr
