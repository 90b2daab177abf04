"""One loop, the same numbers: every backend and world follows the plain single-process loss curve on real data.

Tolerance 2e-5 on losses of about 2: float32 sums over ranks are added in another order, and AdamW magnifies that a
little in every step. A wrong factor anywhere shows in the first three digits.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_testing import spawn

TOLERANCE = 2e-5
GLOBAL_BATCH, WINDOW, EPOCHS, STEPS = 16, 2, 2, 5
"""Rows of a micro-step over all ranks, micro-steps of a window, epochs, optimizer steps in each (the last is short)."""
MICRO_STEPS = STEPS * WINDOW - 1
MAX_NORM = 0.7


def digits() -> tuple[Tensor, Tensor]:
    """The first handwritten digits: ``(N, 1, 8, 8)`` images, ``(N,)`` labels."""
    images, labels = load_digits(return_X_y=True)
    rows = GLOBAL_BATCH * MICRO_STEPS
    return torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:rows])


def text() -> tuple[Tensor, Tensor]:
    """Bytes of a module of the standard library, ``(N, 24)``, and the next ones; each row counts another length."""
    source = torch.tensor(list(pathlib.Path(functools.__file__).read_bytes()[: 25 * GLOBAL_BATCH * MICRO_STEPS]))
    rows = source.clamp(max=127).view(-1, 25)
    inputs, labels = rows[:, :-1], rows[:, 1:].clone()
    # One row in eight counts nothing.
    labels[torch.arange(24)[None] >= (torch.arange(len(rows))[:, None] % 8) * 3] = -100
    return inputs.contiguous(), labels


class Convolutions(nn.Module):
    """A small convolutional net with group norm; ``(B, 1, 8, 8) -> (B, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(72, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Language(nn.Module):
    """One attention block with tied embeddings; ``(B, T) -> (B, T, 128)``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 128, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.block(self.table(x), src_mask=mask, is_causal=True))


TASKS = {"digits": (Convolutions, digits), "text": (Language, text)}


def start(task: str) -> tuple[nn.Module, Any, Any, tuple[Tensor, Tensor]]:
    """Model, optimizer, scheduler and data, the same everywhere."""
    kind, data = TASKS[task]
    torch.manual_seed(5)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, OneCycleLR(optimizer, 0.01, total_steps=EPOCHS * STEPS + 1), data()


def loss_sum(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, summed over the labels that count."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def plain_curve(task: str) -> list[float]:
    """Loss of every optimizer step, by plain torch in this process: a window is one batch."""
    model, optimizer, scheduler, (x, y) = start(task)
    losses = []
    rows = GLOBAL_BATCH * WINDOW
    for _ in range(EPOCHS):
        for first in range(0, len(x), rows):
            labels = y[first : first + rows]
            loss = loss_sum(model(x[first : first + rows]), labels) / (labels != -100).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


def curve(task: str, backend: str) -> list[float]:
    """The same through ``Accelerator``, in the loop that every script writes."""
    accelerator = Accelerator(cpu=True, distributed_type=backend, gradient_accumulation_steps=WINDOW)
    model, optimizer, scheduler, data = start(task)
    rows = GLOBAL_BATCH // accelerator.backend.topology.dp_size
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*data), batch_size=rows), scheduler
    )
    losses, total, items = [], torch.zeros(()), torch.zeros(())
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss, count = loss_sum(model(x), y), (y != -100).sum()
                accelerator.backward(loss, num_items=count)
                total, items = total + loss.detach(), items + count
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    losses.append((accelerator.reduce(total) / accelerator.reduce(items)).item())
                    total, items = torch.zeros(()), torch.zeros(())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return losses


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.gate("*-2-digits", "megatron-2-text")
@pytest.mark.turns(2)
def test_curve_is_the_single_process_one(task: str, place: tuple[str, int]) -> None:
    backend, world_size = place
    expected = plain_curve(task)
    assert len(expected) == EPOCHS * STEPS
    assert expected[-1] < expected[0], "the reference does not learn, so the curve says little"
    for found in spawn(curve, world_size, task, backend):
        assert found == pytest.approx(expected, abs=TOLERANCE)
