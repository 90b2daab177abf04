"""A backend whose ``average`` forgets a gradient is named itself, and not the script that it trains."""

from __future__ import annotations

from dataclasses import replace

import torch
from replicated_backend import INFO
from torch import nn
from toy_backend import Plugin

from drivetrain import Accelerator
from drivetrain.errors import BackendBrokenError
from drivetrain.registry import get_registry
from drivetrain_testing.processes import spawn


def steps(backend: str, *, diverged: bool) -> str:
    info = replace(INFO, name="tried", backend=f"replicated_backend:{backend}")
    get_registry().register(Plugin(info), name=info.name)
    accelerator = Accelerator(distributed_type="tried", cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(3):
            scale = float("nan") if diverged else 1.0
            accelerator.backward(scale * model(torch.randn(2, 4) + accelerator.process_index).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    except BackendBrokenError as error:
        return str(error)
    accelerator.end_training()
    return ""


def test_a_gradient_that_average_forgets_is_named() -> None:
    for said in spawn(steps, 3, "SkippingBackend", diverged=False):
        assert said.startswith("average left gradients that are not the same on all ranks: of 0.weight [replicated_")


def test_a_model_that_diverges_is_no_fault_of_the_backend() -> None:
    for diverged in (False, True):
        assert spawn(steps, 3, "AveragingBackend", diverged=diverged) == [""] * 3
