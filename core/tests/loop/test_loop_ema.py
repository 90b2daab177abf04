"""Averages of weights beside changes of their model; tests/parity and the kit compare the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import EMA, Accelerator
from drivetrain.errors import UnsupportedError
from drivetrain_testing import spawn


def changed_after_an_update(folder):
    accelerator = Accelerator(cpu=True, distributed_type="single")
    model = accelerator.prepare(nn.Linear(2, 1))
    ema = EMA(accelerator, model)
    other = EMA(accelerator, accelerator.prepare(nn.Linear(3, 1)))
    for each in (ema, other):
        each.update()
    model.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UnsupportedError, match=r"Make EMA\(\.\.\.\) again after changing a model"):
        ema.update()
    again = EMA(accelerator, model)
    again.update()
    accelerator.save_state(folder)
    model.seen += 1
    again.update()
    accelerator.load_state(folder)
    accelerator.end_training()
    return again.num_updates, other.num_updates


def test_an_average_is_made_again_after_its_model_was_changed(tmp_path):
    assert spawn(changed_after_an_update, 1, str(tmp_path / "checkpoint")) == [(1, 1)]
