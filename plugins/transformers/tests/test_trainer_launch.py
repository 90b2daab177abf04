"""``drivetrain launch --trainer`` runs a script that names Transformers' classes; the example resumes elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import trainer_jobs as jobs

from drivetrain_testing import spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import trainer_jobs as jobs
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

class Mine(Trainer):
    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if self.is_world_process_zero() and "loss" in logs:
            print("found", logs["loss"], self.args.world_size, self.accelerator.distributed_type)

jobs.quiet()
assert issubclass(Seq2SeqTrainer, Trainer)
args = jobs.arguments(TrainingArguments, sys.argv[1], per_device_train_batch_size=3, gradient_accumulation_steps=2)
Mine(jobs.llama(), args, train_dataset=jobs.Words(22)).train()
"""


def launch(*words: str, code: int = 0) -> str:
    command = [str(Path(sys.executable).with_name("drivetrain")), "launch", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.gate("False")
def test_a_script_as_it_is(as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    script = ["-m", "theirs"] if as_module else [str(tmp_path / "theirs.py")]
    printed = launch("--config", str(EXAMPLES / "fsdp.yaml"), "--trainer", *script, str(tmp_path / "run"))
    found = re.findall(r"^found (\S+) 2 fsdp$", printed, re.MULTILINE)
    expected = spawn(jobs.stock, 1, str(tmp_path / "stock"), timeout=60, **jobs.WINDOWS)[0][0]["loss"]
    assert [float(one) for one in found] == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_a_users_fsdp_file_as_it_stands(tmp_path: Path) -> None:
    script = SCRIPT.replace("per_device_train_batch_size=3", "per_device_train_batch_size=2")
    (tmp_path / "theirs.py").write_text(script)
    (tmp_path / "users.yaml").write_text(jobs.USERS_FILE.format(processes=4))
    printed = launch("--config", str(tmp_path / "users.yaml"), "--cpu", "--trainer", str(tmp_path / "theirs.py"),
                     str(tmp_path / "run"))  # fmt: skip
    found = re.findall(r"^found (\S+) 4 fsdp$", printed, re.MULTILINE)
    windows = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    expected = spawn(jobs.stock, 1, str(tmp_path / "stock"), timeout=60, **windows)[0][0]["loss"]
    # bfloat16 has 8 bits, and losses are near 4.
    assert [float(one) for one in found] == pytest.approx(expected, abs=2e-2)


def test_a_program_without_python_is_refused(tmp_path: Path) -> None:
    said = launch("--cpu", "--trainer", "--no_python", "ls", code=2)
    assert "--trainer changes what a Python script imports, and --no_python starts a program" in said


def test_take_over_is_refused_after_a_subclass_was_made() -> None:
    assert "Late inherits from transformers.Trainer already" in spawn(too_late, 1)[0]


def too_late() -> str:
    import transformers

    from drivetrain_transformers import script

    kept = type("Late", (transformers.Trainer,), {})
    try:
        script.take_over()
    except Exception as error:
        return str(error)
    return f"{kept} was not seen"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run of the example on one process: its folder, and the loss at its end."""
    folder = tmp_path_factory.mktemp("example")
    printed = launch("--config", str(EXAMPLES / "single.yaml"), *example_with(folder, 16))
    (end,) = re.findall(r"^single: eval_loss (\S+) after 8 updates$", printed, re.MULTILINE)
    return folder, float(end)


def example_with(folder: Path, batch: int) -> list[str]:
    return [str(EXAMPLES / "trainer.py"), "--steps", "8", "--out", str(folder), "--batch", str(batch)]


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ("ddp", 8),
        ("fsdp", 8),
        ("deepspeed", 8),
        ("tensor", 16),
        ("megatron", 16),
    ],
)
@pytest.mark.slow
@pytest.mark.turns(2)
def test_the_example_resumes_under_every_file(
    config: str, batch: int, example: tuple[Path, float], tmp_path: Path
) -> None:
    if config == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    shutil.copytree(example[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    again = launch("--config", str(EXAMPLES / f"{config}.yaml"), *example_with(tmp_path, batch), "--resume")
    name = "megatron" if config == "tensor" else config
    (found,) = re.findall(rf"^{name}: eval_loss (\S+) after 8 updates$", again, re.MULTILINE)
    assert float(found) == pytest.approx(example[1], abs=2e-4)
    assert (tmp_path / "checkpoint-8").is_dir()
    assert (tmp_path / "config.json").is_file()
