"""Checks what a script sees of an optimizer under ``data_parallel: zero1``: parameters whole, states in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator
from drivetrain_testing import spawn

CONFIG: dict[str, Any] = {"distributed_type": "megatron", "megatron_lm_plugin": {"data_parallel": "zero1"}}


def made(config: dict[str, Any]) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **config)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.arange(8.0).view(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def seen() -> tuple[bool, list[int], list[float]]:
    accelerator, model, optimizer = made(CONFIG)
    step(accelerator, model, optimizer)
    held: list[Tensor] = optimizer.param_groups[0]["params"]
    same = all(one is other for one, other in zip(held, model.parameters(), strict=True))
    moments: list[Any] = [optimizer.state[one]["exp_avg"] for one in held]
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in moments]
    return same, [one.numel() for one in parts], [float(one.sum()) for one in parts]


def test_groups_hold_the_models_parameters_and_states_are_parts() -> None:
    ranks = spawn(seen, 3)
    accelerator, model, optimizer = made({"distributed_type": "single"})
    step(accelerator, model, optimizer)
    assert all(same for same, _, _ in ranks)
    # Seven rows are three, three and one; of two rows by seven columns the columns are cut; two numbers stay whole.
    held = list(zip(*(sizes for _, sizes, _ in ranks), strict=True))
    assert held == [(12, 12, 4), (3, 3, 1), (6, 6, 2), (2, 2, 2)]
    for index, one in enumerate(model.parameters()):
        sums = [each[index] for _, _, each in ranks]
        whole = float(optimizer.state[one]["exp_avg"].sum())
        assert whole == pytest.approx(sums[0] if index == 3 else sum(sums), abs=1e-6)
