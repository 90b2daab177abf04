"""Memory that forward makes and writes in one stage and reads in another; and what a stage changes in place first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_and_prepared import WIDTH, Net, accelerator, follow, refused
from torch import Tensor, nn

from drivetrain_testing import spawn


class Added(Net):
    """Every layer's rows are added into new memory."""

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.zeros(len(x), WIDTH)
            rows.index_add_(0, torch.arange(len(x)), torch.tanh(layer(x)))
            x = rows
        return x


class Assigned(Net):
    """By indices, a part first and the rest after the next layer, which may be of another stage."""

    def encode(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), WIDTH)
        for index, layer in enumerate(self.layers):
            part = slice(2 * index, 2 * index + 2)
            rows[:, part] = torch.tanh(layer(x))[:, part]
            x = rows + x
        return rows


class Copied(Net):
    """Written once, read behind the other layers; what was computed of it is read as well."""

    def encode(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), WIDTH)
        rows.copy_(self.layers[0](x))
        doubled = rows * 2
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + rows + doubled


class Inside(Net):
    """A layer of a layer returns its memory, and a stage may begin between the two."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.zeros(len(x), WIDTH)
            return rows.index_add_(0, torch.arange(len(x)), self.inner(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))


class InPlace(Net):
    """Each stage begins with what changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LeakyReLU(inplace=True), layer) for layer in self.layers)

    def encode(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        return x


class Zeroed(Net):
    """A value of the first layer is changed behind each of the others."""

    def encode(self, x: Tensor) -> Tensor:
        first = torch.sin(self.layers[0](x))
        x = first.clone()
        for index, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x))
            first[:, index] = 0.0
            first.mul_(0.5)
            x = x + first
        return x


class Residual(Net):
    """A layer's own output is changed in place, as residual networks do."""

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            before, x = x, layer(x)
            x += before
            x[:, 0] = 0.0
        return x


class View(Net):
    """Memory that is written through a view of it alone."""

    def encode(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), WIDTH)
        rows[:, :4].copy_(self.layers[0](x)[:, :4])
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + rows


class Joined(View):
    """What its refusal says: without a change in place."""

    def encode(self, x: Tensor) -> Tensor:
        rows = torch.cat((self.layers[0](x)[:, :4], torch.zeros(len(x), WIDTH - 4)), 1)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + rows


class Indexed(View):
    """The other thing that it says: as a whole, by indices."""

    def encode(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), WIDTH)
        rows[:, :4] = self.layers[0](x)[:, :4]
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + rows


class Kept(Net):
    """A buffer that one stage writes and another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        with torch.no_grad():
            self.middle.copy_(h.detach().mean(0))
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return h - self.middle


RIGHT = [Added, Assigned, Copied, Inside, InPlace, Zeroed, Residual, Joined, Indexed]


def trained(section: dict[str, Any]) -> None:
    made = accelerator(section)
    for kind in RIGHT:
        follow(made, kind)
        made.free_memory()
    made.end_training()


@pytest.mark.gate("1f1b-2")
@pytest.mark.parametrize(
    ("world", "schedule"),
    [
        pytest.param(2, "1f1b", id="1f1b-2"),
        pytest.param(3, "1f1b", id="1f1b-3"),
        pytest.param(2, "zbv", id="zbv-2"),
        pytest.param(2, "interleaved_1f1b", id="interleaved-2"),
    ],
)
def test_what_one_stage_writes_another_reads(world: int, schedule: str) -> None:
    section = {"pipeline_parallel_size": world, "num_micro_batches": 4, "schedule": schedule}
    spawn(trained, world, section, timeout=240)


def refusals(section: dict[str, Any]) -> None:
    made = accelerator(section)
    refused(made, r"into memory, through a view of it,.*at 'layers", View)
    refused(made, r"into a buffer or an argument of forward.*at 'layers", Kept)
    made.end_training()


def test_what_cannot_be_sent_is_refused() -> None:
    spawn(refusals, 2, {"pipeline_parallel_size": 2, "num_micro_batches": 4})
