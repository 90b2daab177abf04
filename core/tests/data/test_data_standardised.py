"""Inputs and targets that a script normalises over the rows of its batch: known by their values, and named once."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.data.standardised import is_standardised
from drivetrain_testing import spawn

torch.manual_seed(0)
TABLE = torch.rand(12, 5) * torch.tensor([1.0, 0.1, 30.0, 4.0, 1.0]) + torch.tensor([0.0, 2.0, 50.0, -3.0, 7.0])
IMAGES = torch.rand(8, 3, 16, 16) * 0.5 + torch.tensor([0.1, 0.3, 0.5]).view(1, 3, 1, 1)
SERIES = torch.rand(8, 20, 4) * 3 + 1

TELLS_OF_HOOKS = hasattr((torch.ones(2, requires_grad=True) * torch.ones(2)).grad_fn._raw_saved_other, "unpack_hook")
"""torch 2.9 does not tell whether reading what a node saves would run a checkpoint again, and nothing is read."""

NORMALISED = {
    "columns": (TABLE - TABLE.mean(0)) / TABLE.std(0),
    "columns, with an epsilon": (TABLE - TABLE.mean(0)) / (TABLE.std(0) + 1e-5),
    "columns, without Bessel's factor": (TABLE - TABLE.mean(0)) / TABLE.std(0, correction=0),
    "columns, as a batch norm does": F.batch_norm(TABLE, None, None, training=True, eps=1e-7),
    "columns, one of them constant": torch.cat([(TABLE - TABLE.mean(0)) / TABLE.std(0), torch.ones(12, 1)], 1),
    "a column": (TABLE[:, 0] - TABLE[:, 0].mean()) / TABLE[:, 0].std(),
    "all numbers": (IMAGES - IMAGES.mean()) / IMAGES.std(),
    "channels": (IMAGES - IMAGES.mean((0, 2, 3), keepdim=True)) / IMAGES.std((0, 2, 3), keepdim=True),
    "features of a series": (SERIES - SERIES.mean((0, 1))) / SERIES.std((0, 1)),
    "pixels": (IMAGES - IMAGES.mean(0)) / (IMAGES.std(0) + 1e-6),
    "64 bits": ((TABLE - TABLE.mean(0)) / TABLE.std(0)).double(),
}
NOT = {
    "drawn": torch.randn(12, 5),
    "drawn, many": torch.randn(256, 100),
    "as they are": IMAGES,
    "by numbers of the data set": (IMAGES[:4] - IMAGES.mean()) / IMAGES.std(),
    "each row": F.layer_norm(TABLE, (5,)),
    "each sample": F.layer_norm(IMAGES, (3, 16, 16)),
    "channels of each sample": F.instance_norm(IMAGES),
    "two values": torch.tensor([-1.0, 1.0]).repeat(6)[:, None].expand(-1, 4),
    "constant": torch.ones(12, 5),
    "words": torch.arange(12).view(4, 3),
    "two rows": torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]]),
    "none": torch.empty(0, 4),
    "a number": torch.tensor(1.0),
    "16 bits": ((TABLE - TABLE.mean(0)) / TABLE.std(0)).bfloat16(),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_rows_that_were_normalised_by_their_own_numbers_are_known(name):
    assert is_standardised(NORMALISED[name])


@pytest.mark.parametrize("name", NOT)
def test_others_are_not_taken_for_them(name):
    assert not is_standardised(NOT[name])


def test_drawn_numbers_are_hardly_ever_taken_for_them():
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 1), (12, 2), (64,), (128, 100), (16, 3, 8, 8)]
    assert not any(is_standardised(torch.randn(shape, generator=generator)) for shape in shapes * 100)


def by_all_ranks(accelerator, values):
    every = accelerator.gather(values)
    return (values - every.mean(0)) / every.std(0)


NORMALISE = {
    "inputs": lambda _, x, y: ((x - x.mean(0)) / x.std(0), y),
    "inputs by all ranks": lambda accelerator, x, y: (by_all_ranks(accelerator, x), y),
    "targets": lambda _, x, y: (x, (y - y.mean()) / y.std()),
    "targets by all ranks": lambda accelerator, x, y: (x, by_all_ranks(accelerator, y)),
}


def warnings_of(what):
    """Return what a rank logs in two steps, and the weights after them."""
    torch.manual_seed(0)
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("drivetrain").addHandler(handler)
    accelerator = Accelerator(cpu=True, split_batches=True)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3)) * 3 + 2
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        inputs, targets = NORMALISE[what](accelerator, *batch)
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    weights = model.weight.detach().tolist()
    accelerator.end_training()
    logging.getLogger("drivetrain").removeHandler(handler)
    return [each for each in seen if "deviation 1" in each or "normalised over them" in each], weights


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("inputs", "Inputs of Linear ([6, 4]) have mean 0 and deviation 1 over their 6 rows"),
        pytest.param(
            "targets", "it compares them with targets that were normalised over them",
            marks=pytest.mark.skipif(not TELLS_OF_HOOKS, reason="torch 2.9: nothing that a loss keeps is read"),
        ),
    ],
)
def test_rank_0_names_them_once(what, said):
    (first, differs), (second, _) = spawn(warnings_of, 2, what)
    assert second == []
    (one,) = first
    assert said in one
    assert "accelerator.gather(" in one
    ((alone, expected),) = spawn(warnings_of, 1, what)
    assert alone == []
    assert torch.tensor(differs).sub(torch.tensor(expected)).abs().max() > 1e-4
    # What it says is right: nothing is said then, and the weights are those of one process.
    for seen, weights in spawn(warnings_of, 3, f"{what} by all ranks"):
        assert seen == []
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=2e-6)
