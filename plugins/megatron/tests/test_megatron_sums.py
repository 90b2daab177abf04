"""Losses that are sums over the batch, in pipelines with several data-parallel ranks: refused, or the true numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_config
from drivetrain.api import DrivetrainError
from drivetrain_testing import spawn

ROWS, STEPS = 16, 2
SECTION = {"pipeline_parallel_size": 2, "num_micro_batches": 2}
TOLERANCE = 2e-5
"""Float32: parts of a batch are added in another order."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * STEPS, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (ROWS * STEPS,), generator=generator))


def sum_of_torchs_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def sum_by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(1, y[:, None]).sum()


def sum_over_a_constant(z: Tensor, y: Tensor) -> Tensor:
    """Nine are three rows of three classes: a trial on a few rows must not take it for their number."""
    return F.cross_entropy(z, y, reduction="sum") / 9


def sum_over_the_batch_of_all_ranks(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum") / ROWS


def sum_by_values(z: Tensor, y: Tensor) -> Tensor:
    """It cannot be recorded: control flow on the output."""
    loss = F.cross_entropy(z, y, reduction="sum")
    return loss if float(z.detach().abs().max()) < 1e9 else loss * 0


def mean_by_rows(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum") / len(y)


def mean_by_a_factor(z: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(z, y, reduction="none") * (1 / len(y))).sum()


def mean_of_torchs_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + 0.1 * z.pow(2).sum(1).mean()


def train(loss_fn: Callable[[Tensor, Tensor], Tensor], how: str) -> str | list[Tensor]:
    """The weights of the main process's stages, or what was refused.

    Args:
        loss_fn: of outputs and labels.
        how: ``backward``, ``train_step``, or ``items``: the same with ``num_items``.
    """
    overrides = {"distributed_type": "megatron", "use_cpu": True, "megatron": SECTION}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(samples(), batch_size=ROWS // accelerator.backend.topology.dp_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        for x, y in loader:
            if how == "train_step":
                accelerator.train_step(model, (x, y), lambda output, batch: loss_fn(output, batch[1]))
            else:
                counted = {"num_items": len(y)} if how == "items" else {}
                accelerator.backward(loss_fn(model(x), y), **counted)
                optimizer.step()
                optimizer.zero_grad()
        return list(accelerator.get_state_dict(model).values())
    except DrivetrainError as error:
        return str(error)
    finally:
        accelerator.end_training()


@pytest.mark.parametrize("how", ["backward", "train_step"])
@pytest.mark.parametrize(
    "loss_fn", [sum_of_torchs_loss, sum_by_hand, sum_over_a_constant, sum_over_the_batch_of_all_ranks]
)
@pytest.mark.gate("sum_of_torchs_loss-backward", "sum_by_hand-train_step")
def test_a_sum_over_the_batch_is_refused_on_every_rank(loss_fn: Any, how: str) -> None:
    for said in spawn(train, 4, loss_fn, how):
        assert "the loss is a sum over this rank's 8 rows, and losses are averaged over 2 ranks" in said


def test_a_sum_that_cannot_be_recorded_is_refused_on_every_rank() -> None:
    for said in spawn(train, 4, sum_by_values, "train_step"):
        assert "the loss is a sum over this rank's 8 rows" in said


@pytest.mark.parametrize(
    ("loss_fn", "how"),
    [
        (mean_by_rows, "backward"),
        (mean_by_rows, "train_step"),
        (mean_by_a_factor, "backward"),
        (mean_of_torchs_loss, "train_step"),
        (sum_of_torchs_loss, "items"),
    ],
)
@pytest.mark.gate("mean_by_rows-backward", "sum_of_torchs_loss-items")
def test_means_train_as_on_one_process(loss_fn: Any, how: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(samples(), batch_size=ROWS):
        loss = loss_fn(model(x), y)
        (loss / len(y) if how == "items" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = spawn(train, 4, loss_fn, how)[0]
    for one, other in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
