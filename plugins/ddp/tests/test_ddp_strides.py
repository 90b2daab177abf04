"""Parameters whose strides change after ``prepare``, and gradients of a static graph that are reduced late."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain.api import UsageError
from drivetrain_testing import spawn

STEPS, CHANGED_AT = 5, 1


class Net(nn.Module):
    """A square weight and a convolution; ``(B, 4), (B, 3, 5, 5) -> (B, 2)``."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.first = nn.Conv2d(3, 6, (3, 2)), nn.Linear(4, 6)
        self.square, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, images: Tensor) -> Any:
        hidden = torch.tanh(self.first(x) + self.pixels(images).mean((2, 3)))
        return self.last(torch.tanh(self.square(hidden)))


def nothing(model: Any, step: int) -> None:
    del model, step


@torch.no_grad()
def transposes_in_each_step(model: Any, step: int) -> None:
    del step
    model.square.weight.t_()


def transposes_data(model: Any, step: int) -> None:
    if step == CHANGED_AT:
        model.square.weight.data = model.square.weight.data.t()


def converts_to_channels_last(model: Any, step: int) -> None:
    if step == CHANGED_AT:
        model.to(memory_format=torch.channels_last)


def permutes_one_weight(model: Any, step: int) -> None:
    if step == CHANGED_AT:
        weight = model.pixels.weight
        weight.data = weight.data.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


CHANGES = (nothing, transposes_in_each_step, transposes_data, converts_to_channels_last, permutes_one_weight)


def train(change: Any, micro_batches: int, ranks: int, section: dict[str, Any] | None) -> list[Tensor]:
    """The parameters after some steps, each behind a window of ``no_sync``; without a section by a plain loop."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    x, images = torch.randn(12, 4, generator=generator), torch.randn(12, 3, 5, 5, generator=generator)
    accelerator = None
    if section is not None:
        accelerator = Accelerator(config=load_config(overrides={"distributed_type": "ddp", "ddp": section}, environ={}))
        model, optimizer = accelerator.prepare(model, optimizer)
        x, images = (each.chunk(ranks)[accelerator.process_index] for each in (x, images))
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(micro_batches):
            inside = accelerator is not None and index < micro_batches - 1
            with accelerator.no_sync(model) if accelerator is not None and inside else nullcontext():
                loss = (model(x, images) * (1 + index)).pow(2).mean()
                loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        change(model, step)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    if accelerator is not None:
        accelerator.free_memory()
    return parameters


def train_all(micro_batches: int, ranks: int, section: dict[str, Any]) -> list[list[Tensor]]:
    return [train(change, micro_batches, ranks, section) for change in CHANGES]


@pytest.mark.parametrize(
    ("section", "ranks", "tolerance"),
    [
        ({}, 2, 1e-6),
        ({}, 3, 1e-6),
        ({"static_graph": True}, 2, 1e-6),
        # Averaged in 16 bits; a transposed gradient is off by a hundred times more.
        ({"comm_hook": "fp16", "gradient_as_bucket_view": True}, 2, 1e-4),
    ],
    ids=["2 ranks", "3 ranks", "static graph", "hook"],
)
def test_parameters_with_other_strides_train_as_on_one_process(
    section: dict[str, Any], ranks: int, tolerance: float
) -> None:
    found = spawn(train_all, ranks, 2, ranks, section)
    for index, change in enumerate(CHANGES):
        expected = train(change, 2, 1, None)
        for each in found:
            for mine, plain in zip(each[index], expected, strict=True):
                torch.testing.assert_close(mine, plain, atol=tolerance, rtol=0, msg=f"{change.__name__}, {section}")


def change_on_one_rank(section: dict[str, Any]) -> str:
    """Return what is said where rank 1 alone changes strides, and no value."""

    def change(model: Any, step: int) -> None:
        if step == 2 and torch.distributed.get_rank() == 1:
            model.square.weight.data = model.square.weight.data.t().contiguous().t()

    try:
        train(change, 1, 2, section)
    except (UsageError, RuntimeError) as refused:
        return str(refused)
    return ""


def test_other_strides_on_one_rank_are_refused() -> None:
    _, said = spawn(change_on_one_rank, 2, {})
    assert "changed strides of parameters of Net after prepare, on this rank and not on all" in said
