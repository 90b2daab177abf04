"""What settings do beside the numbers, which they leave as they are: recompute, gather ahead, communicate, keep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, load_config
from drivetrain_testing import spawn

WIDTH, BLOCKS, WINDOW = 8, 4, 3


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared(section: dict[str, Any], **config: Any) -> tuple[Accelerator, Any, Any]:
    overrides = {"distributed_type": "fsdp", "use_cpu": True, **config}
    overrides |= {f"fsdp.{key}": value for key, value in section.items()}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(3)
    model: Any = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def calls(section: dict[str, Any]) -> int:
    """How often a block's forward runs in one step."""
    accelerator, model, _ = prepared(section)
    Block.calls = 0
    accelerator.backward(model(torch.ones(2, WIDTH)).sum())
    accelerator.end_training()
    return Block.calls // BLOCKS


def ahead(section: dict[str, Any]) -> tuple[list[int], list[int]]:
    """How many units each of root and blocks gathers before its own turn, in forward and in backward."""
    accelerator, model, _ = prepared(section)
    states = [part._get_fsdp_state() for part in (model._drivetrain.trainable.module, *model.blocks)]
    depth = ([len(each._states_to_forward_prefetch) for each in states],
             [len(each._states_to_backward_prefetch) for each in states])  # fmt: skip
    accelerator.end_training()
    return depth


def window(section: dict[str, Any], mesh: dict[str, int]) -> tuple[list[tuple[int, int]], list[int]]:
    """In each micro-batch of a window: gradients reduced (scattered, all-reduced), and bytes of whole ones kept.

    It is the third, since the first two reduce each micro-batch, to look whether the script changes gradients.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    overrides = {f"mesh.{axis}": size for axis, size in mesh.items()}
    accelerator, model, optimizer = prepared(section, gradient_accumulation_steps=WINDOW, **overrides)
    counted: Counter[str] = Counter()
    all_reduce = collectives.dist.all_reduce
    reduce_scatter = collectives.DefaultReduceScatter.__call__

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    collectives.dist.all_reduce = counting("all-reduced", all_reduce)
    collectives.DefaultReduceScatter.__call__ = counting("scattered", reduce_scatter)
    found, kept = [], []
    try:
        for _ in range(3 * WINDOW):
            counted.clear()
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, WIDTH)).sum())
                found.append((counted["scattered"], counted["all-reduced"]))
                kept.append(unreduced(model))
                optimizer.step()
                optimizer.zero_grad()
    finally:
        collectives.dist.all_reduce, collectives.DefaultReduceScatter.__call__ = all_reduce, reduce_scatter
    accelerator.end_training()
    return found[-WINDOW:], kept[-WINDOW:]


def unreduced(model: Any) -> int:
    """Bytes of whole gradients that this rank keeps."""
    total = 0
    for part in (model._drivetrain.trainable.module, *model.blocks):
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (one for group in groups for one in group.fsdp_params):
            grads = [parameter.unsharded_accumulated_grad, getattr(parameter, "_unsharded_param", None)]
            grads[1] = None if grads[1] is None else grads[1].grad
            total += sum(grad.nbytes for grad in grads if grad is not None)
    return total


def everything() -> dict[str, Any]:
    return {
        "plain": calls({}),
        "recomputed": calls({"activation_checkpointing": True}),
        "ahead by default": ahead({}),
        "ahead": ahead({"forward_prefetch": 2, "backward_prefetch": 3}),
        "without sync": window({}, {}),
        "each": window({"accumulate_without_sync": False}, {}),
    }


def replicas() -> dict[str, Any]:
    mesh = {"dp_replicate": 2}
    return {"without sync": window({}, mesh), "each": window({"accumulate_without_sync": False}, mesh)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return spawn(everything, 2)


def test_checkpointing_runs_each_unit_twice(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert (rank["plain"], rank["recomputed"]) == (1, 2)


def test_prefetch_is_as_deep_as_asked_for(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["ahead by default"] == ([0] * 5, [0] * 5), "torch's own overlap of one"
        assert rank["ahead"] == ([2, 2, 2, 1, 0], [3, 0, 1, 2, 3])


UNITS = BLOCKS + 1
WHOLE = 4 * (BLOCKS * (WIDTH * WIDTH + WIDTH) + WIDTH + 1)
"""Bytes of all gradients in float32."""


def test_a_window_communicates_once_at_the_price_of_whole_gradients(found: list[dict[str, Any]]) -> None:
    for rank in found:
        reduced, kept = rank["without sync"]
        assert [scattered for scattered, _ in reduced] == [0, 0, UNITS]
        assert kept == [WHOLE, WHOLE, 0]
        reduced, kept = rank["each"]
        assert [scattered for scattered, _ in reduced] == [UNITS] * WINDOW
        assert kept == [0, 0, 0]


def test_replicas_reduce_between_them_at_the_end_of_a_window_only() -> None:
    for rank in spawn(replicas, 4):
        assert [all_reduced for _, all_reduced in rank["without sync"][0]] == [0, 0, UNITS]
        assert rank["each"][0] == [(UNITS, 0), (UNITS, 0), (UNITS, UNITS)]
