"""Tensors that a loss trains and that are of no prepared model: over several ranks nothing reduces their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.loop.loss import leaves
from drivetrain_testing import spawn

ROWS, RANKS = 12, 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * ROWS, 6, generator=generator), torch.randint(0, 3, (2 * ROWS,), generator=generator)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def in_the_prepared_optimizer(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        optimizer.step()
        optimizer.zero_grad()


def with_an_optimizer_of_its_own(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = accelerator.prepare(net())
    optimizer = torch.optim.SGD([loose], lr=0.1)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x).detach() * loose, y))
        optimizer.step()
        optimizer.zero_grad()


def against_a_frozen_model(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model = accelerator.prepare(net().requires_grad_(False))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + loose, y))
        with torch.no_grad():
            loose.sub_(0.1 * loose.grad)
        loose.grad = None


def in_a_model_that_was_forgotten(accelerator: Any, loose: Tensor, batches: Any) -> None:
    model, other = accelerator.prepare(net()), nn.ParameterList([loose])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x) + other[0], y))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loose.copy_(other[0])


class Shift(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = nn.Parameter(by.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def in_a_module(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """What the refusal says."""
    model, holder = net(), Shift(loose)
    model, holder, optimizer = accelerator.prepare(model, holder, torch.optim.SGD(holder.parameters(), lr=0.1))
    for x, y in batches:
        accelerator.backward(F.cross_entropy(holder(model(x)), y))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loose.copy_(holder.by)


def of_each_rank(accelerator: Any, loose: Tensor, batches: Any) -> None:
    """What the refusal says, too: an attack on this rank's samples."""
    model = accelerator.prepare(net())
    optimizer = torch.optim.SGD([loose], lr=0.1)
    for x, y in batches:
        F.cross_entropy(model(x) + loose, y).backward(inputs=[loose])
        optimizer.step()
        optimizer.zero_grad()


def trained(how: Any) -> tuple[Tensor, str]:
    """The tensor at the end, and the refusal."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    batches = accelerator.prepare(DataLoader(TensorDataset(*data()), batch_size=ROWS))
    loose, said = torch.linspace(-1, 1, 3, requires_grad=True), ""
    try:
        how(accelerator, loose, batches)
    except UsageError as error:
        said = str(error)
    accelerator.end_training()
    return loose.detach().clone(), said


WRONG = [
    in_the_prepared_optimizer,
    with_an_optimizer_of_its_own,
    against_a_frozen_model,
    in_a_model_that_was_forgotten,
]


@pytest.mark.parametrize("how", WRONG)
def test_a_tensor_of_no_prepared_model_is_refused_before_it_is_stepped(how: Any) -> None:
    for loose, said in spawn(trained, RANKS, how):
        assert torch.equal(loose, torch.linspace(-1, 1, 3))
        assert "this rank's samples alone" in said
        assert "an nn.Module whose forward computes with it" in said
        assert "loss.backward() instead of accelerator.backward(loss)" in said


@pytest.mark.parametrize("how", WRONG)
def test_one_process_trains_it(how: Any) -> None:
    ((loose, said),) = spawn(trained, 1, how)
    assert not said
    assert not torch.allclose(loose, torch.linspace(-1, 1, 3), atol=1e-3)


def test_the_cures_of_the_refusal() -> None:
    ((wanted, _),) = spawn(trained, 1, in_a_module)
    for loose, said in spawn(trained, RANKS, in_a_module):
        assert not said
        torch.testing.assert_close(loose, wanted)
    assert [said for _, said in spawn(trained, RANKS, of_each_rank)] == [""] * RANKS


def test_leaves_of_a_loss() -> None:
    one, two, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    found = list(leaves((one * frozen + two.exp() * one).sum()))
    assert len(found) == 2
    assert {id(each) for each in found} == {id(one), id(two)}
    assert list(leaves(frozen.sum())) == []
