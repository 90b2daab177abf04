"""Checks that gradients of one rank's samples alone are noticed beside data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.api import UsageError
from drivetrain_testing import spawn


def trained(how: str, section: dict[str, Any]) -> str:
    accelerator = Accelerator(cpu=True, distributed_type="megatron", megatron_lm_plugin=section)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 4) * (1 + accelerator.process_index)).mean()
    try:
        if how == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, list(model.parameters()))
        optimizer.step()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("backward", "would step with gradients of this rank's samples alone"),
        ("grad", "would return that of this rank's samples alone"),
    ],
)
@pytest.mark.parametrize("section", [{}, {"data_parallel": "zero1"}], ids=["ddp", "zero1"])
def test_gradients_that_no_average_reaches_are_refused(how: str, words: str, section: dict[str, Any]) -> None:
    for said in spawn(trained, 2, how, section):
        assert words in said
