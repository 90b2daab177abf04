"""Checks that schedulers step once per applied optimizer update, whatever the world size and the window."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from drivetrain_testing import models
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario


def falling(optimizer: Optimizer) -> LambdaLR:
    """Rate / (1 + number of moves): every move shows."""
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@case(guards="accelerate#2142, accelerate#1382, transformers#24088")
def once_per_update(kit: Kit) -> None:
    """The learning rates of a run are the single-process ones."""
    compare(kit, Scenario(scheduler=falling))


@case()
def once_per_window(kit: Kit) -> None:
    """Called at every micro-batch, it moves once per window, the short last one included."""
    compare(kit, Scenario(scheduler=falling, window=2, micro_steps=5, epochs=2))


@case()
def explicit_step_moves_it(kit: Kit) -> None:
    """After ``train_step`` one call is one move."""
    compare(kit, Scenario(scheduler=falling, window=2, explicit=True))


@case(guards="accelerate#3797")
def plateau(kit: Kit) -> None:
    """``ReduceLROnPlateau`` counts epochs once, not once per process."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    scheduler: Any = ReduceLROnPlateau(optimizer, patience=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = models.dense_data(6)
    rates = []
    for _ in range(4):
        accelerator.backward(F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert [round(rate, 6) for rate in rates] == [0.1, 0.1, 0.01, 0.01], f"learning rates {rates}"
