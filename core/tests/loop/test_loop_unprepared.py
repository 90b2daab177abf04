"""Optimizers that were not prepared, and step what a loss has trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_testing import spawn


def in_the_place_of_another() -> str:
    """Return the error of an optimizer's step that lies in the memory of an earlier one, of other tensors."""
    accelerator = Accelerator(cpu=True, distributed_type="ddp")
    model: Any = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    try:
        accelerator.backward(model(trained.expand(4, 2)).mean())
        optimizer.step()
        earlier = torch.optim.SGD([idle], lr=0.1)
        earlier.step()
        number = id(earlier)
        del earlier
        kept = []
        for _ in range(100):
            later = torch.optim.SGD([trained], lr=0.1)
            if id(later) == number:
                break
            kept.append(later)
        later.step()
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return "stepped"


def test_an_optimizer_is_not_taken_for_one_that_is_gone() -> None:
    for said in spawn(in_the_place_of_another, 2):
        assert "SGD was not prepared and steps a tensor of shape (2,) that is of no prepared model" in said
