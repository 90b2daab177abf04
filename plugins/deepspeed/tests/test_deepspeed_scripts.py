"""Tests what only ZeRO has: writes into its partitions, copies, the parts of optimizers' states, and fingerprints.

Scripts that any backend could run stand in tests/parity/scripts. They run in each stage, with offload, and with
parameters in parts on three ranks: the places of ``parity_worlds``.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from drivetrain import Accelerator
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_testing import models, spawn
from drivetrain_testing.scenario import full_state, share

# The conformance tests of the same backend hold a script of each kind.
pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
"""What is promised: float32 sums in another order, through AdamW, after four steps."""

VARIANTS: dict[str, dict[str, Any]] = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage3": {"zero_stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    "stage3-small": {"zero_stage": 3},
    "stage3-offload": {
        "zero_stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "stage3_param_persistence_threshold": 0,
    },
}
"""``stage3-small`` keeps all of these small parameters whole between uses."""


class Net(nn.Module):
    """``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 7)
        self.head = nn.Linear(7, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.first(x)))
        return logits


def loss_of(accelerator: Accelerator | None, model: Any, step: int) -> Tensor:
    """Of a batch of the whole run, or of this rank's rows of it."""
    x, y = models.dense_data(12, seed=30 + step)
    if accelerator is not None:
        x, y = share(accelerator, x, y)
    return F.cross_entropy(model(x), y)


def prepared(section: dict[str, Any], folder: str, model: Any, optimizer: Any, **settings: Any) -> Any:
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section, **settings}))
    accelerator = Accelerator(config=path)
    return accelerator, *accelerator.prepare(model, optimizer)


def written_values_stay(section: dict[str, Any], folder: str, precision: str) -> None:
    """A step of learning rate 0 leaves what was written as it is."""
    import deepspeed

    model: Any = Net()
    own = torch.optim.SGD(model.parameters(), lr=0.0)
    accelerator, model, optimizer = prepared(section, folder, model, own, mixed_precision=precision)

    def train(step: int) -> None:
        accelerator.backward(loss_of(accelerator, model, step))
        optimizer.step()
        optimizer.zero_grad()

    train(0)
    weight = model.head.weight
    if section == {"zero_stage": 3}:
        # A small parameter is whole now: what is written is not lost where it is gathered with others to be read.
        weight.data.fill_(3.0)
        with deepspeed.zero.GatheredParameters([model.first.weight, weight]):
            torch.testing.assert_close(weight.data, torch.full_like(weight, 3.0), rtol=0, atol=0)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(torch.arange(weight.numel()).view(weight.shape) / 7)
    if section["zero_stage"] == 3:
        with (
            pytest.raises(RuntimeError, match="modifier_rank=None"),
            deepspeed.zero.GatheredParameters([model.first.weight]),
        ):
            model.first.weight.data.mul_(2)
    train(1)
    expected = torch.arange(4 * 7).view(4, 7) / 7
    torch.testing.assert_close(full_state(accelerator, model)["head.weight"], expected, rtol=0, atol=0)
    accelerator.end_training()


def copies(section: dict[str, Any], folder: str) -> None:
    model: Any = Net()
    accelerator, model, _ = prepared(section, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, models.FEATURES)).sum())
    if section["zero_stage"] == 3:
        for part in (model.head.weight, model.head, model):
            with pytest.raises(UnsupportedError, match="cannot be copied"):
                copy.deepcopy(part)
    else:
        for other in (copy.deepcopy(model), AveragedModel(model).module):
            assert type(other) is Net
            assert all(type(each) is nn.Parameter for each in other.parameters())
            other(torch.ones(2, models.FEATURES)).sum().backward()
            assert other.head.weight.grad is not None
        assert len(copy.deepcopy(model)._forward_pre_hooks) == 0
    if section["zero_stage"]:
        with pytest.raises(UnsupportedError, match=r"cannot be (pickled|copied)"):
            pickle.dumps(model)
    accelerator.end_training()


def not_prepared(section: dict[str, Any], folder: str) -> None:
    model: Any = Net()
    accelerator, model, _ = prepared(section, folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(accelerator.unwrap_model(model).parameters(), lr=0.1)
    if section["zero_stage"]:
        with pytest.raises(UsageError, match="not prepared with it"):
            model._drivetrain.trainable.before_unprepared_step(other)
    else:
        model._drivetrain.trainable.before_unprepared_step(other)
    alone: Any = accelerator.prepare(Net())
    if section["zero_stage"] < 3:  # In stage 3 a backward finds its parameters in parts.
        with pytest.raises(UsageError, match="prepared without an optimizer"):
            accelerator.backward(alone(torch.ones(2, models.FEATURES)).sum())
        with pytest.raises(UsageError, match="prepared without an optimizer"):
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
    accelerator.end_training()


def of_two_optimizers(accelerator: Accelerator | None) -> dict[str, Tensor]:
    """Each loads its own state back, and may change its groups afterwards."""
    with models.seeded(9):
        model: Any = Net()
    mine: Any = torch.optim.AdamW(model.first.parameters(), lr=0.02), torch.optim.AdamW(model.head.parameters(), lr=0.3)
    if accelerator is not None:
        model, *mine = accelerator.prepare(model, *mine)
    for step in range(5):
        loss = loss_of(accelerator, model, step)
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        for optimizer in mine:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in mine]
        if step == 2:
            mine[1].load_state_dict(kept[1])
            mine[0].load_state_dict(kept[0])
            mine[1].param_groups[0]["lr"] = 0.01
    if "drivetrain_part" in kept[0]:
        assert accelerator is not None
        kept[0]["drivetrain_part"] = {"rank": (accelerator.process_index + 1) % 3, "ranks": 3}
        with pytest.raises(UnsupportedError, match=r"is the part of rank \d of 3, and this AdamW holds"):
            mine[0].load_state_dict(kept[0])
        with pytest.raises(UnsupportedError, match="is that of whole parameters, and this"):
            mine[0].load_state_dict({"state": {}, "param_groups": []})
    if accelerator is not None:
        return full_state(accelerator, model)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def compiled_first(section: dict[str, Any], folder: str) -> None:
    """A root module with parameters of its own, in which ``torch.compile`` captures graphs."""
    with models.seeded(4):
        plain, model = Scaled(), Scaled()
        model.load_state_dict(plain.state_dict())
    # What torch says to itself where it traces DeepSpeed's linear layers of stage 3.
    warnings.simplefilter("default")
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    accelerator, compiled, optimizer = prepared(section, folder, compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        x, y = models.dense_data(12, seed=number)
        F.cross_entropy(plain(x), y).backward()
        step.step()
        step.zero_grad()
        x, y = share(accelerator, x, y)
        accelerator.backward(F.cross_entropy(compiled(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found = full_state(accelerator, compiled)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE)
    accelerator.end_training()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.FEATURES))
        self.head = nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def further(section: dict[str, Any], folder: str) -> dict[str, Tensor]:
    written_values_stay(section, folder, "no")
    written_values_stay(section, folder, "bf16")
    copies(section, folder)
    not_prepared(section, folder)
    compiled_first(section, folder)
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": section}))
    accelerator = Accelerator(config=path)
    found = of_two_optimizers(accelerator)
    accelerator.end_training()
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_only_zero_has(variant: str, tmp_path: Path) -> None:
    expected = of_two_optimizers(None)
    for state in spawn(further, 3, VARIANTS[variant], str(tmp_path), timeout=300):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)


def fingerprints() -> None:
    # Here, since it imports DeepSpeed, which changes the environment of the process that imports it.
    from drivetrain_deepspeed import writes

    for dtype in (torch.float32, torch.bfloat16):
        with models.seeded(1):
            part = torch.randn(5000).to(dtype)
        before = writes._fingerprint(part)
        assert torch.equal(before, writes._fingerprint(part.clone()))
        for index in (0, 2047, 4999):
            other = part.clone()
            other[index] += 0.5
            assert not torch.equal(before, writes._fingerprint(other))
        permuted = part.clone()
        permuted[[3, 3000]] = permuted[[3000, 3]]
        assert not torch.equal(before, writes._fingerprint(permuted))
        assert not torch.equal(before, writes._fingerprint(part.flip(0)))


def test_a_write_changes_the_fingerprint() -> None:
    spawn(fingerprints, 1)
