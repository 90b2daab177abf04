"""Checks that attributes, gradients and numbers of optimizers that a script set before ``prepare`` stay."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain import Accelerator


class CountsSteps(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.state["steps"] = 0

    def step(self, closure=None):
        self.state["steps"] += 1
        return super().step(closure)


def test_an_optimizer_keeps_a_number_of_its_own():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, CountsSteps(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(3, 2)).mean())
    optimizer.step()
    assert optimizer.state["steps"] == 1
    accelerator.end_training()


def test_attributes_and_gradients_stay():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model.weight.scale = 2.0
    model(torch.ones(3, 2)).mean().backward()
    before = model.weight.grad.clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.weight.scale == 2.0
    accelerator.backward(model(torch.ones(3, 2)).mean())
    assert torch.equal(model.weight.grad, 2 * before)
    optimizer.zero_grad()
    assert model.weight.grad is None
    accelerator.end_training()
