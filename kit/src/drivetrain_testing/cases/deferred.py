"""Checks computations on outputs, whether they are known at once or only after backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain.errors import DrivetrainError
from drivetrain_testing import models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import assert_same_state, backward, full_state, share


def _ready(kit: Kit, name: str = "dense") -> tuple[Any, Any, Any]:
    accelerator = kit.accelerator()
    model: Any = models.build(name)
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


@case()
def value_after_backward(kit: Kit) -> None:
    """After ``backward`` loss and metrics of every rank's own share can be read on that rank."""
    accelerator, model, _ = _ready(kit)
    plain = models.build("dense")
    x, y = share(accelerator, *models.dense_data(12))
    expected = plain(x.cpu())
    output = model(x)
    loss = F.cross_entropy(output, y)
    hits = (output.argmax(-1) == y).sum()
    accelerator.backward(loss)
    wanted = F.cross_entropy(expected, y.cpu()).item()
    assert loss.item() == pytest.approx(wanted, abs=max(kit.atol, 1e-6)), "the loss"
    assert int(hits) == int((expected.argmax(-1) == y.cpu()).sum()), "a metric of the output"


@case()
def value_before_backward(kit: Kit) -> None:
    """A loss that is printed before ``backward`` is right, and the step is the same as if it had not been printed."""
    accelerator, model, optimizer = _ready(kit)
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    whole, labels = models.dense_data(12)
    x, y = share(accelerator, whole, labels)
    loss = F.cross_entropy(model(x), y)
    assert loss.item() == pytest.approx(F.cross_entropy(plain(x.cpu()), y.cpu()).item(), abs=max(kit.atol, 1e-6))
    accelerator.backward(loss)
    optimizer.step()
    backward(F.cross_entropy(plain(whole), labels))
    step.step()
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case(guards="accelerate#639, accelerate#2109")
def running_total(kit: Kit) -> None:
    """``total += loss.detach()`` over steps, gathered at the end, is the sum of all ranks' losses."""
    accelerator, model, optimizer = _ready(kit)
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    total, expected = torch.zeros((), device=accelerator.device), 0.0
    for turn in range(3):
        whole, labels = models.dense_data(12, seed=90 + turn)
        x, y = share(accelerator, whole, labels)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        step.zero_grad()
        backward(plain_loss := F.cross_entropy(plain(whole), labels))
        step.step()
        expected += plain_loss.item()
    mean = accelerator.gather(total).mean().item()
    assert mean == pytest.approx(expected, abs=max(kit.atol, 1e-5)), f"{mean} over all ranks, not {expected}"


@case()
def outputs_by_name(kit: Kit) -> None:
    """A model that returns a dict with its own loss trains by that loss, and its other outputs can be read."""
    accelerator, model, optimizer = _ready(kit, "labelled")
    plain = models.build("labelled")
    step = SGD(plain.parameters(), lr=0.5)
    whole, labels = models.dense_data(12)
    x, y = share(accelerator, whole, labels)
    outputs = model(x, labels=y)
    accelerator.backward(outputs["loss"])
    expected = plain(x.cpu(), labels=y.cpu())["logits"]
    found = outputs["logits"].detach().cpu() + 0
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=max(kit.atol, 1e-6))
    optimizer.step()
    backward(plain(whole, labels=labels)["loss"])
    step.step()
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case(applies=lambda capabilities: capabilities.pipelined)
def unrecordable_is_refused(kit: Kit) -> None:
    """An operation that a deferred output cannot record raises and names ``train_step``; so does a plain backward."""
    accelerator, model, _ = _ready(kit)
    if not accelerator.backend.capabilities.pipelined:
        return  # These settings make no pipeline; honesty.pipelined_means_deferred has seen that nothing is deferred.
    x, y = share(accelerator, *models.dense_data(12))
    output = model(x)
    with pytest.raises(DrivetrainError, match="train_step"):
        output[0] = 0.0
    with pytest.raises(DrivetrainError, match=r"accelerator\.backward"):
        backward(F.cross_entropy(model(x), y))
