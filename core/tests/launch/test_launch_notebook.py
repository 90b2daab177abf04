"""Functions on forked processes. Each test forks from a fresh interpreter, as a notebook's kernel would."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys
from drivetrain.errors import DrivetrainError
from drivetrain.launch.notebook import debug_launcher, notebook_launcher

def whoami(word):
    import torch, torch.distributed as dist
    dist.init_process_group()
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print(f"{word} {dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="")
    dist.destroy_process_group()

def fails():
    import torch, torch.distributed as dist
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))

"""


@pytest.fixture
def run(clean_environment):
    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", HEAD + code],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Torch 2.9 makes gloo tell on stdout how many it has met.
        done.stdout = re.sub(r"^\[Gloo\] .*\n", "", done.stdout, flags=re.MULTILINE)
        return done

    return run


def test_a_function_runs_on_two_cpu_processes_and_nothing_stays_behind(run):
    done = run("""
before = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
debug_launcher(whoami, ("a",))
debug_launcher(whoami, ("b",), num_processes=3)
assert before == (dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
""")
    assert sorted(done.stdout.split("\n")) == [
        "", "a 0 of 2: 3.0", "a 1 of 2: 3.0", "b 0 of 3: 6.0", "b 1 of 3: 6.0", "b 2 of 3: 6.0",
    ]  # fmt: skip
    assert done.stderr == ""


def test_the_first_failure_is_raised_with_rank_and_traceback(run):
    done = run("""
try:
    debug_launcher(fails)
except DrivetrainError as error:
    print(type(error).__name__, str(error))
""")
    assert done.stdout.startswith("LaunchError Traceback (most recent call last):")
    assert "in fails" in done.stdout
    assert "rank 1 failed: KeyError: 'the cause' (exit code 1)" in done.stdout
    assert done.stdout.count("Traceback") == 1
    assert done.stderr == ""


ENDINGS = {
    "it ends the process": """
def ends(rank):
    if rank == 1:
        sys.exit("no data here")
""",
    "a worker of a loader": """
def ends(rank):
    from torch.utils.data import DataLoader
    class Data:
        def __len__(self):
            return 8
        def __getitem__(self, index):
            raise KeyError("no data here")
    if rank == 1:
        list(DataLoader(Data(), num_workers=1))
""",
    "an import": """
def ends(rank):
    if rank == 1:
        open("broken_module.py", "w").write("raise KeyError('no data here')")
        sys.path.insert(0, os.getcwd())
        import broken_module
""",
    "an exception that is none": """
class Stop(BaseException):
    pass

def ends(rank):
    if rank == 1:
        raise Stop("no data here")
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.gate("it ends the process", "a worker of a loader")
def test_the_functions_own_words_come_first(run, ending, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = run(
        ENDINGS[ending]
        + """
def train():
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank = dist.get_rank()
    ends(rank)
    dist.all_reduce(torch.ones(1))

try:
    debug_launcher(train)
except DrivetrainError as error:
    print(error)
"""
    )
    assert "no data here" in done.stdout
    first = re.search(r"^rank \d .*$", done.stdout, flags=re.MULTILINE)
    assert first is not None
    assert first[0].startswith("rank 1 failed: "), done.stdout
    assert "onnection closed" not in done.stdout.partition(first[0])[0]


@pytest.mark.parametrize("call", ["end_training", "wait_for_everyone"])
@pytest.mark.gate("end_training")
def test_a_collective_call_in_finally_hides_nothing(run, call):
    done = run(f"CALL = {call!r}" + """
import drivetrain.distributed.call_monitor as call_monitor
call_monitor._END_SECONDS = 1
def train():
    from drivetrain import Accelerator
    accelerator = Accelerator(cpu=True)
    try:
        if accelerator.process_index == 1:
            raise KeyError("no data here")
        accelerator.gather(__import__("torch").ones(1))
    finally:
        getattr(accelerator, CALL)()

try:
    debug_launcher(train)
except DrivetrainError as error:
    print(error)
""")
    assert "no data here" in done.stdout


def test_a_closure_runs_with_the_precision_of_the_notebook(run):
    done = run("""
inside = []
def show(a):
    # One string is one write: what two processes print with commas comes out mixed.
    print(f"{a} {os.environ['WORLD_SIZE']} {os.environ['DRIVETRAIN_MIXED_PRECISION']}\\n", end="")
notebook_launcher(lambda a: show(a), ("x",), num_processes=2, mixed_precision="bf16", use_port="0", rdzv_backend="c10d")
notebook_launcher(lambda a: inside.append((a, os.environ["DRIVETRAIN_MIXED_PRECISION"])), ("y",), num_processes=1)
print(inside, "DRIVETRAIN_MIXED_PRECISION" in os.environ)
""")
    assert sorted(done.stdout.split("\n")) == ["", "[('y', 'no')] False", "x 2 bf16", "x 2 bf16"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("notebook_launcher(print, num_processes=0)", "num_processes is 0"),
        ("notebook_launcher(print, num_processes=1, node_rank=1)", "node_rank is 1 and num_nodes is 1"),
        ("notebook_launcher(print, mixed_precision='fp9')", "mixed_precision is 'fp9'"),
        ("notebook_launcher(print, rdzv_backend='etcd')", "rdzv_backend is 'etcd'. Write 'c10d' or 'static'."),
        (
            "notebook_launcher(print, rdzv_conf={'read_timeout': 9})",
            "rdzv_conf has no read_timeout. It takes timeout, join_timeout, last_call_timeout, in seconds.",
        ),
        ("debug_launcher(print, num_processes=0)", "num_processes is 0"),
        (
            (
                "import torch.distributed as d\n"
                "    d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
                "    debug_launcher(print)"
            ),
            "already part of a distributed job",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(run, call, words):
    reports = "except DrivetrainError as error:\n    print(error, flush=True)"
    done = run(f"try:\n    {call}\n{reports}\nimport os; os._exit(0)")
    assert words in done.stdout or words in done.stderr
