"""A number that each rank finds from its own rows and multiplies its loss by: rank 0 says so once, on real engines."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from kept_log import Kept
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.loop.loss import constants_of
from drivetrain_testing import spawn

STEPS, ROWS = 5, 4


def losses_of(accelerator, model):
    """Functions that compute a loss from outputs, inputs and labels, by name."""
    running = [torch.tensor(1.0)]

    def follow(loss, value):
        running[0] = 0.5 * running[0] + 0.5 * value
        return loss / running[0]

    def of_all(loss):
        return accelerator.reduce(loss.detach(), "mean")

    def positives(out, x, y):
        weight = (y == 0).sum() / (y.sum() + 1)
        return F.binary_cross_entropy_with_logits(out[:, 0], y, pos_weight=weight)

    squares = F.mse_loss
    return {
        "running mean": lambda out, x, y: follow(squares(out[:, 0], y), squares(out[:, 0], y).detach()),
        "python number": lambda out, x, y: (squares(out[:, 0], y, reduction="none") * float(x.abs().mean())).mean(),
        "pos_weight": positives,
        "plain": lambda out, x, y: 0.5 * squares(out[:, 0], y),
        "running mean of all": lambda out, x, y: follow(squares(out[:, 0], y), of_all(squares(out[:, 0], y))),
        "penalty": lambda out, x, y: squares(out[:, 0], y)
        + x.abs().mean() * sum(each.square().sum() for each in model.parameters()),
        "by rows": lambda out, x, y: squares(out[:, 0], y, reduction="sum") / len(y),
    }


def train(how, distributed_type):
    """Train for an epoch whose last batch has one row more on rank 0; what the log says of numbers that differ."""
    kept = Kept()
    logging.getLogger("drivetrain").addHandler(kept)
    accelerator = Accelerator(cpu=True, distributed_type=distributed_type)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = (STEPS * ROWS + 1) * accelerator.num_processes + 1
    data = TensorDataset(torch.randn(size, 6), (torch.rand(size) > 0.5).float())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, ROWS))
    loss_of = losses_of(accelerator, model)[how]
    for x, y in loader:
        accelerator.backward(loss_of(model(x), x, y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [line for line in kept.lines if "multiply by other numbers" in line]


@pytest.mark.parametrize("distributed_type", ["ddp", "fsdp", "deepspeed"])
@pytest.mark.parametrize("how", ["running mean", "python number", "pos_weight"])
@pytest.mark.gate("running mean-fsdp", "python number-deepspeed", "pos_weight-ddp")
def test_a_number_of_each_ranks_own_is_said_once(how, distributed_type):
    said, *others = spawn(train, 3 if distributed_type == "ddp" else 2, how, distributed_type)
    assert len(said) == 1
    assert "losses of Sequential" in said[0]
    assert "accelerator.reduce(number, 'mean')" in said[0]
    assert re.search(r"Rank \d has [\d.]+, rank \d has [\d.]+\.$", said[0])
    assert not any(others)


@pytest.mark.parametrize("how", ["plain", "running mean of all", "penalty", "by rows"])
@pytest.mark.gate("running mean of all", "penalty")
def test_numbers_that_are_alike_or_may_differ_are_not_said(how):
    assert spawn(train, 2, how, "ddp") == [[], []]


def test_constants_are_found_above_and_below_the_mean():
    out = nn.Linear(3, 1)(torch.ones(4, 3))[:, 0]
    target, half = torch.zeros(4), torch.tensor(0.5)
    assert constants_of(3 * F.mse_loss(out, target)) == (3.0,)
    assert constants_of((F.mse_loss(out, target, reduction="none") * half).sum() / 8) == (0.125, 0.5)
    assert constants_of(F.mse_loss(out, target) + 2 * out.new_tensor(1.0, requires_grad=True)) == ()
    weighted = F.binary_cross_entropy_with_logits(out, target, pos_weight=torch.tensor(7.0))
    assert constants_of(weighted) == (7.0,)
    assert constants_of(F.mse_loss(out, target)) == ()
