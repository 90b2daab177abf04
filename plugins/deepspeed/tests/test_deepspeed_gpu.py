"""One accelerator: every stage, DeepSpeed's own fused Adam, offload to the machine's memory, both half precisions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.utils import DummyOptim
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state

pytestmark = pytest.mark.gpu

RATE, STEPS = 0.01, 6
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}}
OFFLOADED = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}


def plain() -> tuple[dict[str, Tensor], list[float]]:
    """In float32 on the CPU."""
    model = models.build("dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        x, y = models.dense_data(8, seed=step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, losses


def train(section: dict[str, Any], precision: str, folder: str) -> tuple[dict[str, Tensor], list[float], str]:
    """On the device, saved and resumed half-way."""
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "mixed_precision": precision, "deepspeed": section}))
    losses = []
    for half in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        accelerator = Accelerator(config=path)
        assert accelerator.device.type == torch.accelerator.current_accelerator().type
        with accelerator.init_empty_weights():
            model: Any = models.build("dense")
        own = DummyOptim(model.parameters()) if "config" in section else None
        optimizer: Any = own or torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if half.start:
            accelerator.load_state(f"{folder}/half")
        for step in half:
            x, y = (each.to(accelerator.device) for each in models.dense_data(8, seed=step))
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not half.start:
            accelerator.save_state(f"{folder}/half")
        state, kind = full_state(accelerator, model), type(optimizer.optimizer).__name__
        accelerator.end_training()
    return state, losses, kind


@pytest.mark.parametrize("section", [*({"zero_stage": stage} for stage in range(4)), OFFLOADED], ids=str)
def test_follows_the_cpu(section: dict[str, Any], tmp_path: Path) -> None:
    expected, losses = plain()
    ((state, found, _),) = spawn(train, 1, section, "no", str(tmp_path), timeout=110)
    # The device sums in another order, and matrix products may be rounded to TF32 where torch is told so.
    assert found == pytest.approx(losses, abs=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(400)  # Compiled at first use.
@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"zero_stage": 2, "config": FUSED}, "FusedAdam"),
        ({"zero_stage": 3, "config": FUSED}, "FusedAdam"),
        ({"config": FUSED, **OFFLOADED}, "DeepSpeedCPUAdam"),
    ],
)
def test_its_own_optimizers(section: dict[str, Any], kind: str, tmp_path: Path) -> None:
    expected, losses = plain()
    ((state, found, made),) = spawn(train, 1, section, "no", str(tmp_path), timeout=350)
    assert made == kind
    assert found == pytest.approx(losses, abs=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("section", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, OFFLOADED], ids=str)
def test_half_precision(section: dict[str, Any], precision: str, tmp_path: Path) -> None:
    _, losses = plain()
    ((_, found, _),) = spawn(train, 1, section, precision, str(tmp_path), timeout=110)
    # bfloat16 has 8 bits, float16 11; the loss scale of float16 may skip first steps, which delays the curve.
    assert found[0] == pytest.approx(losses[0], abs=3e-2)
    if precision == "bf16":
        assert found == pytest.approx(losses, abs=5e-2)
    assert all(torch.isfinite(torch.tensor(found)))


def constructed(precision: str, folder: str) -> dict[str, Tensor]:
    """Weights that a constructor draws, and some that are drawn once more from outside, by each of the usual ways."""
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    section = {"distributed_type": "deepspeed", "deepspeed": {"zero_stage": 3}, "mixed_precision": precision}
    path.write_text(json.dumps(section))
    accelerator = Accelerator(config=path)
    torch.manual_seed(5)
    with accelerator.init_empty_weights():
        model: Any = drawn_again()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE))
    state = full_state(accelerator, model)
    accelerator.end_training()
    return state


def drawn_again() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Embedding(5, 4), nn.Linear(16, 4))
    model[0].weight.data.normal_(0.0, 0.02)
    nn.init.trunc_normal_(model[1].weight)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn_like(model[2].weight))
    return model


def test_initial_values_are_those_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = drawn_again().state_dict()
    (state,) = spawn(constructed, 1, "no", str(tmp_path), timeout=110)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)
