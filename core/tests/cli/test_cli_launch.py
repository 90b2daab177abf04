"""``launch`` and ``test`` from the command line down to real workers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from drivetrain.cli import launch as launch_command
from drivetrain.cli.test import without_the_model
from drivetrain.config import load_config, worker_config

SCRIPT = """
import sys
from drivetrain.config import worker_config
from drivetrain.launch.environment import read_process_info
config = worker_config().config
process = read_process_info()
line = [process.rank, process.world_size, sys.argv[1:]]
line += [config.mixed_precision, config.gradient_accumulation_steps, config.debug]
open(f"seen{process.rank}", "w").write(repr(line))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_flags_before_the_script_are_ours_and_after_it_the_scripts(drivetrain, script, tmp_path):
    (tmp_path / "c.yaml").write_text("mixed_precision: fp16\ngradient_accumulation_steps: 8\n")
    done = drivetrain(
        "launch", "--config", "c.yaml", "--num-processes", "2", "--cpu", "--mixed_precision", "no", "--debug", script,
        "--mixed_precision", "bf16", "--help", "x",
        DRIVETRAIN_MIXED_PRECISION="bf16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arguments = ["--mixed_precision", "bf16", "--help", "x"]
    for rank in (0, 1):
        assert (tmp_path / f"seen{rank}").read_text() == repr([rank, 2, arguments, "no", 8, True])
    assert done.stderr.startswith("drivetrain ")
    assert re.search(r" on 2 processes of the CPU \(\d+ cores?\)\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ""),
        (("--epochs", "3", "--mixed_precision", "bf16"), ""),
        (
            ("--epochs", "3", "--num_processes", "2", "--main-process-port=1"),
            "Given to train.py: --num_processes, --main-process-port. Options of the launcher stand before the script.",
        ),
    ],
)
def test_options_of_ours_behind_the_script_are_mentioned(arguments, said):
    assert launch_command._behind("some/train.py", arguments) == said


def test_sections_that_wait_are_mentioned():
    pytest.importorskip("drivetrain_fsdp")
    resolved = load_config(overrides={"fsdp.cpu_offload": True, "distributed_type": "single"}, environ={})
    assert launch_command._unused(resolved, "single") == (
        "Not used: fsdp, which is a section of the configuration, since single trains."
    )
    assert launch_command._unused(resolved, "fsdp") == ""


def test_quiet_drops_the_header_and_a_module_runs(drivetrain, script, tmp_path):
    done = drivetrain("launch", "-q", "--num_processes", "1", "-m", "train", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "seen0").read_text().startswith("[0, 1, ['-m']")


def test_a_failing_script_gives_its_code_and_one_traceback(drivetrain, tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('bang')")
    done = drivetrain("launch", "--num_processes", "2", "train.py")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1


def test_what_cannot_be_launched_is_an_error_without_a_traceback(drivetrain, script):
    done = drivetrain("launch", "--distributed_type", "single", "--num_processes", "2", script)
    assert done.returncode == 1
    assert done.stderr.startswith("error: backend 'single' trains in one process, but 2 were asked for")
    done = drivetrain("launch", "--distributed_type", "fdsp", script)
    assert "no installed backend is called 'fdsp'" in done.stderr
    assert "Did you mean 'fsdp'?" in done.stderr
    done = drivetrain("launch", "--num_proceses", "2", script)
    assert done.returncode == 2
    assert "--num_processes" in done.stderr


SHARDED = ("--cpu", "--num_processes", "2", "--distributed_type")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cpu",),
        ("--num_processes", "1", "--mixed_precision", "bf16"),
        (*SHARDED, "fsdp"),
        (*SHARDED, "megatron", "--set", "megatron.tensor_parallel_size=2"),
        (*SHARDED, "deepspeed", "--set", "deepspeed.gradient_clipping=1.0"),
    ],
)
@pytest.mark.gate("arguments2")
def test_the_self_test_checks_gather_gradients_and_checkpoints(drivetrain, arguments):
    done = drivetrain("test", *arguments)
    assert done.returncode == 0, done.stderr
    for word in ("gather", "gradients: parameters equal", "save_state, load_state", "Everything works."):
        assert word in done.stdout
    # Torch 2.9 itself prints a line whenever gloo connects ranks.
    first = next(line for line in done.stdout.splitlines() if not line.startswith("[Gloo] Rank "))
    assert first.startswith("1 process(es)" if "1" in arguments else "2 process(es)")


def test_the_self_test_leaves_out_what_is_about_the_users_model(monkeypatch):
    """Workers read the environment once more, which must not bring a setting back."""
    monkeypatch.setenv("DRIVETRAIN_FSDP__WRAP", "package.of_a_user:units")
    megatron = {"split_points": "layers.6", "data_parallel": "zero1"}
    given = load_config(overrides={"fsdp.cpu_offload": True, "megatron": megatron, "plan.check": True})
    kept, dropped = without_the_model(given)
    assert sorted(dropped) == ["fsdp.wrap", "megatron.split_points", "plan.check"]
    left = {"fsdp": {"cpu_offload": True}, "megatron": {"data_parallel": "zero1"}}
    assert kept.sections == left
    monkeypatch.setenv("DRIVETRAIN_CONFIG", kept.to_json())
    assert worker_config().sections == left
    assert not worker_config().config.plan.check


def test_the_self_test_notices_gradients_of_the_wrong_size(tmp_path):
    code = """if True:
        from drivetrain import Accelerator
        from drivetrain.cli import self_test
        Accelerator.backward = lambda self, loss, **_: (2 * loss).backward()
        self_test.main()
    """
    words = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    ).stderr
    assert "SelfTestError: parameters differ from one plain process by" in words
