"""A device that runs behind the host: whether a step was applied is known late, and nobody waits for it early."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.backend import StepResult


class Device:
    """Stands in for the engine's step: applies it or not, and says so when it is asked."""

    def __init__(self, trainable, skips):
        self.skips, self.asked, self._step = list(skips), [], trainable.optimizer_step

    def __call__(self, optimizer, closure=None):
        number, skipped = len(self.skips), self.skips.pop(0)
        if not skipped:
            self._step(optimizer, closure)

        def pending():
            self.asked.append(number)
            return skipped

        return StepResult(pending=pending)


@pytest.fixture
def run():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    yield (accelerator, *accelerator.prepare(model, optimizer, scheduler))
    accelerator.end_training()


def step(accelerator, model, optimizer, scheduler):
    accelerator.backward(F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def test_a_pending_step_is_asked_about_before_the_next_one_and_not_earlier(run):
    model, optimizer = run[1:3]
    device = model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [False, True, False])
    step(*run)
    assert device.asked == []
    step(*run)
    assert device.asked == [3]
    step(*run)
    assert device.asked == [3, 2]
    assert not optimizer.step_was_skipped
    assert device.asked == [3, 2, 1]
    assert optimizer.num_applied == 2


@pytest.mark.parametrize("look", ["param_groups", "get_last_lr", "last_epoch", "state_dict"])
def test_whoever_looks_at_a_rate_sees_the_moved_one(run, look):
    _, model, optimizer, scheduler = run
    device = model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [False, True])
    step(*run)
    found = {
        "param_groups": lambda: optimizer.param_groups[0]["lr"],
        "get_last_lr": lambda: scheduler.get_last_lr()[0],
        "last_epoch": lambda: 0.5**scheduler.last_epoch,
        "state_dict": lambda: scheduler.state_dict()["_last_lr"][0],
    }
    assert found[look]() == 0.5
    assert len(device.asked) == 1
    step(*run)
    assert found[look]() == 0.5, "a skipped step moves no scheduler"


def test_the_next_step_uses_the_moved_rate(run):
    accelerator, model, optimizer = run[:3]
    model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [False, False])
    before = model.weight.detach().clone()
    step(*run)
    middle = model.weight.detach().clone()
    accelerator.backward(F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)))
    gradient = model.weight.grad.clone()
    optimizer.step()
    assert not torch.equal(before, middle)
    torch.testing.assert_close(model.weight.detach(), middle - 0.5 * gradient)


def test_train_step_tells_whether_each_step_was_skipped(run):
    accelerator, model, _, _ = run
    device = model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [True, False])
    batch = (torch.ones(4, 3), torch.zeros(4, 2))
    outputs = [accelerator.train_step(model, batch, lambda output, batch: F.mse_loss(output, batch[1])) for _ in "ab"]
    assert len(device.asked) == 1
    assert [output.skipped for output in outputs] == [True, False]


def test_a_save_waits_for_a_pending_step(run, tmp_path):
    accelerator, model, _, scheduler = run
    device = model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [False])
    step(*run)
    accelerator.save_state(tmp_path / "saved")
    assert len(device.asked) == 1
    assert scheduler.scheduler.last_epoch == 1


def test_every_step_is_handed_to_the_device(run, monkeypatch):
    accelerator = run[0]
    calls = []
    monkeypatch.setattr(type(accelerator.backend), "sync", lambda _: calls.append(1))
    step(*run)
    step(*run)
    assert len(calls) == 2


def test_a_scheduler_that_is_called_in_each_micro_batch_moves_once_a_window(run):
    accelerator, model, optimizer, scheduler = run
    accelerator.gradient_accumulation_steps = 2
    model._drivetrain.trainable.optimizer_step = Device(model._drivetrain.trainable, [False, True, False])
    for _ in range(6):
        with accelerator.accumulate(model):
            step(*run)
    assert scheduler.get_last_lr() == [0.25]
    assert optimizer.num_applied == 2
