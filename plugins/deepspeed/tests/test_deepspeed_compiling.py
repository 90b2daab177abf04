"""What DeepSpeed compiles: its own Adam trains as torch's does, and where nothing compiles there is a cure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.api import BackendBlockedError
from drivetrain.utils import DummyOptim
from drivetrain_deepspeed.compiling import guard
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

TOLERANCE = 3e-6
"""Float32 sums in another order, and an Adam that rounds otherwise than torch's; seen are 4e-7 after six steps."""

RATE = 0.02
OWN = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": False}}}

compiles = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None,
    reason="DeepSpeed's own Adam is compiled, and there is no C++ compiler or no ninja on PATH",
)


def accelerator_with(section: dict[str, Any], folder: str) -> Accelerator:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
    return Accelerator(config=path)


def plain(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    for step in range(6):
        optimizer.zero_grad()
        x, y = models.dense_data(8, seed=step)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict())


def train(section: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], str]:
    """The same under DeepSpeed, saved after half of the steps and resumed by new engines."""
    for half in (range(3), range(3, 6)):
        accelerator = accelerator_with(section, folder)
        model: Any = models.build("dense")
        model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
        if half.start:
            accelerator.load_state(f"{folder}/half")
        for step in half:
            x, y = share(accelerator, *models.dense_data(8, seed=step))
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if not half.start:
            accelerator.save_state(f"{folder}/half")
        state, kind = full_state(accelerator, model), type(optimizer.optimizer).__name__
        accelerator.end_training()
    return state, kind


@compiles
@pytest.mark.slow
@pytest.mark.timeout(400)  # A first build takes a minute, and several on a busy machine.
@pytest.mark.parametrize("stage", [2, 3])
def test_its_own_adam_is_torchs(stage: int, tmp_path: Path) -> None:
    expected = plain(models.build("dense"))
    section = {"zero_stage": stage, "offload_optimizer": "cpu", "config": OWN}
    for state, kind in spawn(train, 2, section, str(tmp_path), timeout=350):
        assert kind == "DeepSpeedCPUAdam"
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)


# ---- nothing to compile with --------------------------------------------------------------------------------------

TRAIN = """
import torch
from drivetrain import Accelerator
from drivetrain.utils import DummyOptim
accelerator = Accelerator(distributed_type="deepspeed", cpu=True, deepspeed_plugin=SECTION)
model = torch.nn.Linear(3, 2)
accelerator.prepare(model, DummyOptim(model.parameters()))
"""


def alone(section: dict[str, Any], **variables: str) -> str:
    """The last line that a script of one process leaves; it must fail."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN.replace("SECTION", repr(section))],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_cure_without_a_compiler(tmp_path: Path) -> None:
    said = alone(
        {"zero_stage": 2, "offload_optimizer": "cpu", "config": OWN}, PATH="", TORCH_EXTENSIONS_DIR=str(tmp_path)
    )
    assert "its optimizer AdamW (cpu_adam) when it is first made, and there is no C++ compiler (c++) on PATH" in said
    assert "apt install g++ ninja-build" in said
    assert "`torch_adam: true`" in said
    assert not list(tmp_path.iterdir())


@compiles
def test_cure_of_a_build_that_fails(tmp_path: Path) -> None:
    section = {"zero_stage": 2, "offload_optimizer": "cpu", "config": OWN}
    compiler = shutil.which("false")
    assert compiler is not None
    said = alone(section, CXX=compiler, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "DeepSpeed could not compile its optimizer AdamW (cpu_adam)" in said
    assert "`torch_adam: true`" in said


def blocked(config: dict[str, Any], installed: dict[str, bool] | None = None, error: Exception | None = None) -> str:
    with pytest.raises(BackendBlockedError) as caught:
        guarded(config, installed or {}, error)
    return str(caught.value)


def guarded(config: dict[str, Any], installed: dict[str, bool], error: Exception | None = None) -> None:
    with guard(config, installed):
        if error is not None:
            raise error


def test_cure_of_each_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    lion = {"optimizer": {"type": "Lion"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert "cpu_lion" in blocked(lion)
    assert "torch_adam" not in blocked(lion)
    assert "fused_adam" in blocked({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    for config, installed in (
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, {}),
        (lion, {"cpu_lion": True}),  # It came compiled.
        ({"zero_optimization": {"stage": 3}}, {}),
    ):
        guarded(config, installed)
    monkeypatch.setenv("CXX", sys.executable)
    assert "there is no ninja on PATH" in blocked(lion)


@compiles
def test_whatever_the_builder_raises_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.19.8 takes "9.0a", an architecture of torch's list, for two numbers."""
    # DeepSpeed sets it when it is imported, in a process where nothing has before.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    with pytest.raises(BackendBlockedError) as caught, guard({"optimizer": {"type": "Adam"}}, {}):
        FusedAdamBuilder().load()
    assert "could not compile its optimizer Adam (fused_adam): invalid literal" in str(caught.value)
    assert "TORCH_CUDA_ARCH_LIST=9.0a" in str(caught.value)


@compiles
def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="fused_adam"):
        guarded({"optimizer": {"type": "Adam"}}, {}, RuntimeError("of somebody else's fused_adam"))


def test_lock_of_a_broken_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for program in ("c++", "ninja"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    config = {"optimizer": {"type": "AdamW", "params": {}}}
    guarded(config, {})  # somebody may be building just now
    os.utime(lock, (0, 0))
    assert f"rm {lock}" in blocked(config)
