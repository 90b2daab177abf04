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

WORLDS = pytest.mark.parametrize(("world", "section"), PIPELINES)


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


def switches(section: dict[str, Any]) -> int:
    made = accelerator(section)
    traced = 0
    trace = Planner._trace

    def counted(planner: Planner, arguments: Any) -> Any:
        nonlocal traced
        traced += 1
        return trace(planner, arguments)

    Planner._trace = counted  # type: ignore[method-assign]
    follow(made, Adapted, preferring)
    made.end_training()
    return traced


@WORLDS
def test_a_reference_between_a_forward_and_its_backward(world: int, section: dict[str, Any]) -> None:
    """Numbers of one process; and each of the two ways through the model is found once, not in each step."""
    for traced in spawn(switches, world, section):
        # On and off, of whole batches and of micro-batches, and before the first time that the script switches.
        assert traced <= 6


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
    spawn(refusals, world, section)
