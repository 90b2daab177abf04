"""Two models that one rank calls in another order than the others are refused instead of waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, load_config
from drivetrain.api import UnsupportedError
from drivetrain_testing import RankFailedError, spawn


class First(nn.Sequential):
    """One of two towers."""


class Second(nn.Sequential):
    """The other, of the same shape."""


def tower(kind: type[nn.Module]) -> Any:
    return kind(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train(swapped_at: int) -> None:
    """Rank 1 calls the second model first in one step."""
    accelerator = Accelerator(config=load_config(overrides={"distributed_type": "fsdp", "use_cpu": True}, environ={}))
    torch.manual_seed(0)
    first, second = tower(First), tower(Second)
    optimizer: Any = torch.optim.SGD([*first.parameters()], lr=0.1)
    other: Any = torch.optim.SGD([*second.parameters()], lr=0.1)
    first, second, optimizer, other = accelerator.prepare(first, second, optimizer, other)
    x = torch.ones(2, 4)
    for step in range(swapped_at + 1):
        if step == swapped_at and accelerator.process_index == 1:
            ours, theirs = reversed((second(x), first(x)))
        else:
            ours, theirs = first(x), second(x)
        accelerator.backward(ours.pow(2).mean() + theirs.pow(2).mean())
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_in_another_order_on_one_rank_are_named(ranks: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        spawn(train, ranks, 1)
    assert isinstance(caught.value.cause, UnsupportedError), caught.value
    said = str(caught.value.cause)
    assert "rank 0 in model 0 (First) gathers the parameters of First at test_fsdp_order_of_models.py:41" in said
    assert "rank 1 in model 1 (Second) gathers the parameters of Second at test_fsdp_order_of_models.py:39" in said
    assert "ranks call models in different orders" in said
    assert "in the same order on every rank" in said


def test_another_order_after_the_first_steps_is_found_beside_the_training() -> None:
    with pytest.raises(RankFailedError) as caught:
        spawn(train, 2, 14)
    said = str(caught.value.cause)
    assert "in optimizer step 28" in said
    assert "rank 0: backward at test_fsdp_order_of_models.py:42, models called in the order 0, 1" in said
    assert "rank 1: backward at test_fsdp_order_of_models.py:42, models called in the order 1, 0" in said


def evaluate(distributed_type: str, *, everywhere: bool) -> float:
    """Call a model in evaluation, on the main process alone or on every rank."""
    settings = {"distributed_type": distributed_type, "use_cpu": True, "process_group": {"timeout_seconds": 6}}
    accelerator = Accelerator(config=load_config(overrides=settings, environ={}))
    torch.manual_seed(0)
    model = accelerator.prepare(tower(First))
    said = 0.0
    if everywhere or accelerator.is_main_process:
        with torch.no_grad():
            said = model.eval()(torch.ones(2, 4)).sum().item()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return said


def test_a_model_that_the_main_process_alone_evaluates_is_named() -> None:
    torch.manual_seed(0)
    expected = pytest.approx(tower(First)(torch.ones(2, 4)).sum().item())
    with pytest.raises(RankFailedError) as caught:
        spawn(evaluate, 2, "fsdp", everywhere=False)
    assert isinstance(caught.value.cause, UnsupportedError), caught.value
    said = str(caught.value.cause)
    assert said.startswith("rank 0 gathers the parameters of First at test_fsdp_order_of_models.py:")
    assert "(model First), and rank 1 has not come within" in said
    assert spawn(evaluate, 2, "fsdp", everywhere=True) == [expected] * 2
    assert spawn(evaluate, 2, "ddp", everywhere=False) == [expected, 0.0]
