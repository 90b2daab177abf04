"""Models that join the rows of their batch in forward: known by their graph, and named once."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.loop.loss import how_rows_meet_in_model, why_no_mean_of_rows
from drivetrain_testing import spawn

ROWS, FEATURES, HIDDEN = 6, 5, 8

torch.manual_seed(0)
scale, shift = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
codes, square = nn.Parameter(torch.randn(7, HIDDEN)), nn.Parameter(torch.randn(HIDDEN, HIDDEN))
of_rows = nn.Parameter(torch.randn(ROWS, HIDDEN))
ones, labels = torch.ones(5, FEATURES), torch.arange(ROWS) % 3
first, last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 3)
time_first = nn.MultiheadAttention(HIDDEN, 2)
batch_first = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)


def with_words(h, attend, words=4):
    z = h[:, None].expand(-1, words, -1)
    return (z + attend(z, z, z)[0]).mean(1)


JOINED = {
    "std() goes over all of them": lambda h: (h - h.mean(0)) / (h.std(0) + 1e-3),
    "mean() goes over all of them": lambda h: h - h.mean(0, keepdim=True),
    "it normalises by statistics": lambda h: F.batch_norm(h, None, None, scale, shift, training=True),
    "they attend to one another": lambda h: h + time_first(h, h, h)[0],
    "they attend": lambda h: h + time_first(h, h, h, need_weights=False)[0],
    "attend to one another": lambda h: with_words(h, time_first),
    "softmax() goes over all of them": lambda h: h * h.softmax(0),
    "max() goes over all of them": lambda h: h / h.abs().max(),
    "sort() goes over all of them": lambda h: h + h.sort(0).values,
    "vectornorm() goes over all of them": lambda h: F.normalize(h, dim=0),
    "var() goes over all of them": lambda h: h / (h.var(0) + 0.1).sqrt(),
    "cumsum() goes over all of them": lambda h: h.cumsum(0),
    "it compares them with one another": lambda h: h + (h @ h.T).softmax(1) @ h,
    "it compares them": lambda h: h + torch.cdist(h, h).sum(1, keepdim=True),
}
APART = {
    "a layer": torch.relu,
    "layer norm": lambda h: F.layer_norm(h, (HIDDEN,)),
    "group norm": lambda h: F.group_norm(h, 2),
    "instance norm": lambda h: F.instance_norm(h[:, None]).mean(1),
    "batch norm in evaluation": lambda h: F.batch_norm(h, torch.zeros(HIDDEN), torch.ones(HIDDEN), scale, shift),
    "attention over words": lambda h: with_words(h, batch_first),
    "attention over as many words as rows": lambda h: with_words(h, batch_first, ROWS),
    "softmax of each row": lambda h: h * h.softmax(1),
    "weights that are normalised": lambda h: h @ F.normalize(square, dim=0),
    "as many parameters as rows": lambda h: h + of_rows.std(0),
    "a mean over words": lambda h: h[:, None].expand(-1, 4, -1).transpose(0, 1).mean(0),
    "distances to codes": lambda h: h + torch.cdist(h, codes).sum(1, keepdim=True),
    "products in each row": lambda h: (h[:, :, None] @ h[:, None]).mean(2),
    "pooled by numbers": lambda h: torch.zeros(ROWS, HIDDEN).index_add(0, torch.arange(ROWS), h),
    "as many features as rows": lambda h: (
        torch.bmm(h[:, None, :ROWS].expand(-1, 4, -1).reshape(1, -1, ROWS), first(ones)[:, :ROWS].T[None])
        .view(ROWS, 4, -1)
        .mean((1, 2), keepdim=True)[..., 0]
        .expand(-1, HIDDEN)
    ),
    "a loop": lambda h: torch.stack([one * one.softmax(0) for one in h]),
    "a sum for all ranks": lambda h: h - AllReduced.apply(h.mean(0)),
}


class AllReduced(torch.autograd.Function):
    """Stands for a script's own exchange of statistics."""

    @staticmethod
    def forward(_, value):
        return value.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient


@pytest.mark.parametrize("kind", [*JOINED, *APART])
def test_rows_that_meet_in_a_model_are_known(kind):
    h = {**JOINED, **APART}[kind](first(torch.randn(ROWS, FEATURES)))
    loss = F.cross_entropy(last(torch.relu(h)), labels)
    found = how_rows_meet_in_model(loss, ROWS)
    assert (kind in found) if kind in JOINED else not found, found


def test_a_checkpoint_is_not_recomputed():
    runs = []

    def block(h):
        runs.append(len(h))
        return with_words(h.tanh().softmax(0) * torch.arange(1.0, ROWS + 1)[:, None], time_first)

    h = checkpoint(block, first(torch.randn(ROWS, FEATURES)), use_reentrant=False)
    loss = F.cross_entropy(last(h), labels)
    assert how_rows_meet_in_model(loss, ROWS)
    weights = checkpoint(lambda h: h * torch.arange(1.0, ROWS + 1).softmax(0), loss.expand(ROWS), use_reentrant=False)
    assert why_no_mean_of_rows(weights.sum(), ROWS) is None
    assert runs == [ROWS]


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.tanh(h - h.mean(0)))


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))


def said(kind, distributed_type, **settings):
    """Count how often rank 0 says that rows meet, in two epochs."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("drivetrain").addHandler(handler)
    accelerator = Accelerator(cpu=True, distributed_type=distributed_type, **settings)
    torch.manual_seed(0)
    model = kind()
    data = TensorDataset(torch.randn(24, FEATURES), torch.arange(24) % 3)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=6)
    )
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return sum("joins the 6 rows of this batch in forward: " in one for one in messages)


def test_a_model_that_joins_rows_is_named_once():
    assert spawn(said, 2, Centred, "ddp") == [1, 0]
    assert said(Centred, "single", gradient_accumulation_steps=2) == 1
    assert said(Centred, "single") == 0


def test_batch_norms_are_named_in_prepare_and_not_again():
    assert spawn(said, 2, Normed, "ddp") == [0, 0]
    assert spawn(said, 2, Normed, "ddp", sync_batch_norm=True) == [0, 0]
