"""``model.to(...)`` and the like of a prepared model: the engine is told unless nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator


def made(accelerator: Accelerator) -> tuple[Any, list[int]]:
    """A prepared model of a convolution and a counter, and a list to which each conversion adds that it was told."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    prepared = accelerator.prepare(model)
    told: list[int] = []
    prepared._drivetrain.trainable.before_conversion = lambda: told.append(1)
    return prepared, told


CONVERSIONS = {
    "to the same device": (lambda m: m.to("cpu"), 0),
    "to the same dtype": (lambda m: m.float().to(torch.float32), 0),
    "cpu": (lambda m: m.cpu(), 0),
    "double": (lambda m: m.double(), 1),
    "half": (lambda m: m.half(), 1),
    "channels last": (lambda m: m.to(memory_format=torch.channels_last), 1),
    "shared": (lambda m: m.share_memory(), 1),
    "in place": (lambda m: m._apply(lambda t: t.mul_(2) if t.is_floating_point() else t), 1),
    "meta": (lambda m: m.to_empty(device="meta"), 1),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_an_engine_is_told_of_conversions_that_change_something(accelerator: Accelerator, name: str) -> None:
    convert, num_told = CONVERSIONS[name]
    model, told = made(accelerator)
    before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    assert convert(model) is model
    assert len(told) == num_told
    if not num_told:
        after = {key: value.data_ptr() for key, value in model.state_dict().items()}
        assert after == {key: place for key, (place, _) in before.items()}
    if name == "in place":
        assert torch.equal(model[0].weight, 2 * before["0.weight"][1])
    if name == "double":
        assert model[0].weight.dtype == torch.float64
        assert model[1].num_batches_tracked.dtype == torch.int64


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    yield made
    made.end_training()
