"""Checks that schedulers move as on one process: at each call outside of open windows and skipped steps."""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from drivetrain_testing import models
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario, assert_same_numbers, assert_same_state, backward, full_state, share


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


@case()
def moves_before_training(kit: Kit) -> None:
    """Three moves before the first step, by which a script resumes a schedule, count as on one process."""
    _compare_moves(kit, before=3, after=1)


@case()
def moves_before_the_step(kit: Kit) -> None:
    """A scheduler that moves before the optimizer steps moves as on one process."""
    _compare_moves(kit, first=1)


@case()
def moves_twice_a_step(kit: Kit) -> None:
    """Two moves after each step are two moves."""
    _compare_moves(kit, after=2)


def _compare_moves(kit: Kit, *, before: int = 0, first: int = 0, after: int = 0) -> None:
    """Train three steps beside plain torch, with moves before training, before each step and after each step."""
    accelerator = kit.accelerator()
    x, y = models.dense_data(12)
    mine, labels = share(accelerator, x, y)
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, ExponentialLR(optimizer, 0.7))
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    schedule = ExponentialLR(step, 0.7)
    found: list[float] = []
    expected: list[float] = []

    def move(times: int) -> None:
        for _ in range(times):
            scheduler.step()
            schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
        expected.append(step.param_groups[0]["lr"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch's of this order, which the script means.
        move(before)
        for _ in range(3):
            move(first)
            accelerator.backward(F.cross_entropy(model(mine), labels))
            backward(F.cross_entropy(plain(x), y))
            for one in (optimizer, step):
                one.step()
                one.zero_grad()
            move(after)
    assert_same_numbers("learning rate", found, expected, 1e-12)
    try:
        assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)
    except AssertionError as error:
        raise AssertionError(f"param_groups has the right rates, and steps were made with others: {error}") from None


@case()
def metric_of_each_rank(kit: Kit) -> None:
    """``ReduceLROnPlateau`` that is given another metric on each rank moves all ranks by the mean of them."""
    accelerator = kit.accelerator()
    topology = accelerator.backend.topology
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    scheduler: Any = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    # The mean falls, stays and rises; that of the first rank alone rises, falls and falls.
    for mean, apart in ((4.0, 0.0), (3.0, -2.0), (3.0, 1.0), (5.0, 3.5)):
        share_of = (2 * topology.dp_rank - topology.dp_size + 1) / max(topology.dp_size - 1, 1)
        scheduler.step(mean + apart * share_of)
        rates.append(optimizer.param_groups[0]["lr"])
    every = accelerator.backend.gather_object(rates)
    assert all(each == rates for each in every), f"ranks have other learning rates: {every}"
    assert rates == [0.1, 0.1, 0.05, 0.025], f"learning rates {rates}, those of the mean are [0.1, 0.1, 0.05, 0.025]"
