"""A part of a pipelined model that is switched off for a reference, between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_and_prepared import PIPELINES, WIDTH, Net, accelerator, follow, refused
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain_megatron.pipeline.planning import Planner
from drivetrain_testing import spawn

CUTS = {2: ["layers.2"], 3: ["layers.1", "layers.3"]}
"""Not at a small one, which is not called while it is switched off."""

WORLDS = pytest.mark.parametrize(
    ("world", "section"), [(world, {**section, "split_points": CUTS[world]}) for world, section in PIPELINES]
)


class Adapted(Net):
    """Each layer has a small one beside it, which is switched off and frozen at once, as PEFT does it."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers.requires_grad_(False)
        self.head.requires_grad_(False)
        self.switch(on=True)

    def switch(self, *, on: bool) -> None:
        for layer in self.small:
            layer.on, layer.names = on, ["default"]
            layer.requires_grad_(on)

    def encode(self, x: Tensor) -> Tensor:
        for layer, small in zip(self.layers, self.small, strict=True):
            x = torch.tanh(layer(x) + small(x) if small.on else layer(x))
        return x


def preferring(model: Any, one: Any) -> Tensor:
    """A loss beside that of the model without its adapter, which is computed after the forward that is trained."""
    found = F.cross_entropy(model(one.x), one.labels, reduction="none")
    model.switch(on=False)
    with torch.no_grad():
        reference = F.cross_entropy(model(one.x), one.labels, reduction="none")
    model.switch(on=True)
    return -F.logsigmoid(reference - found).mean()


def switches(section: dict[str, Any]) -> list[int]:
    """How often a way through the model had been looked for at the beginning of each step, and at the end."""
    made = accelerator(section)
    traced, marks = 0, []
    trace = Planner._trace

    def counted(planner: Planner, arguments: Any) -> Any:
        nonlocal traced
        traced += 1
        return trace(planner, arguments)

    def loss(model: Any, one: Any) -> Tensor:
        marks.append(traced)
        return preferring(model, one)

    Planner._trace = counted  # type: ignore[method-assign]
    follow(made, Adapted, loss)
    made.end_training()
    return [*marks[1::2], traced]


@WORLDS
def test_a_reference_between_a_forward_and_its_backward(world: int, section: dict[str, Any]) -> None:
    """Numbers of one process; and each of the two ways through the model is found once, not in each step."""
    for first, second, third, end in spawn(switches, world, section, timeout=120):
        assert first == 0
        # In the second step the script has switched for the first time.
        assert second > 0
        assert third == end


def frozen_at_backward(model: Any, one: Any) -> Tensor:
    found = F.cross_entropy(model(one.x), one.labels)
    model.small.requires_grad_(False)
    return found


def refusals(section: dict[str, Any]) -> None:
    made = accelerator(section)
    refused(made, "frozen or unfrozen between its forward and", Adapted, frozen_at_backward)
    made.end_training()


@WORLDS
def test_what_is_frozen_otherwise_in_backward_is_refused(world: int, section: dict[str, Any]) -> None:
    spawn(refusals, world, section, timeout=120)
