"""Attributes that a script sets on prepared objects are its own objects', or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.errors import UsageError


class Scaled(torch.optim.SGD):
    """Multiplies each gradient by an attribute of its own."""

    factor = 1.0

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return super().step(closure)


def test_an_optimizers_own_attribute_is_the_one_that_it_reads():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    source = Scaled(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, source)
    before = model.weight.detach().clone()
    optimizer.factor = 0.0
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert (source.factor, optimizer.factor) == (0.0, 0.0)
    assert torch.equal(model.weight, before)
    # What a scheduler puts around `step` belongs to the object that it was given.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    assert "step" not in vars(source)
    accelerator.end_training()


def test_a_schedulers_attributes_are_the_ones_that_it_reads():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    source = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, source)
    scheduler.last_epoch, scheduler.base_lrs = 3, [10.0]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    assert (source.last_epoch, scheduler.last_epoch) == (4, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0)
    accelerator.end_training()


def test_what_a_loader_reads_by_is_taken_over_at_prepare():
    accelerator = Accelerator(cpu=True)
    source = DataLoader(torch.arange(8.0), batch_size=2)
    loader = accelerator.prepare(source)
    loader.title = "train"
    assert source.title == loader.title == "train"
    for name, value in {"collate_fn": list, "batch_size": 4, "num_workers": 1}.items():
        with pytest.raises(UsageError, match=f"{name} of a prepared loader was set.*(?s:.*)this {name}"):
            setattr(loader, name, value)
    assert len(list(loader)) == 4
    accelerator.end_training()


@pytest.mark.parametrize("kind", ["optimizer", "scheduler", "loader"])
def test_prepared_objects_have_no_other_attributes_of_their_own(kind):
    """Each attribute that their own methods set is in the list of those that are not passed on."""
    from drivetrain.data import loader as of_loaders
    from drivetrain.loop import optimizer as of_optimizers

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    source = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(source, 1)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, source, schedule, DataLoader(torch.ones(4, 2), batch_size=2)
    )
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
    prepared, names = {
        "optimizer": (optimizer, of_optimizers._OF_PREPARED),
        "scheduler": (scheduler, of_optimizers._OF_PREPARED_SCHEDULER),
        "loader": (loader, of_loaders._OF_PREPARED),
    }[kind]
    assert vars(prepared).keys() == names
    accelerator.end_training()
