"""What ``gather_for_metrics((x, y))`` costs: against the two all_gathers that it stands for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate

ROWS, CLASSES = 64, 10


def measure(calls: int, rounds: int) -> dict[str, Samples]:
    """All contenders: class scores and labels of a full batch. Runs on every rank; the unit is a call."""
    peers.begin()
    scores, labels = torch.randn(ROWS, CLASSES), torch.randint(0, CLASSES, (ROWS,))
    world = dist.get_world_size()
    # The name since torch 2.13; the old one warns at each call.
    gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def bare() -> None:
        for value in (scores, labels):
            gather_into(value.new_empty(world * ROWS, *value.shape[1:]), value)

    calling: dict[str, Any] = {peers.BARE: bare, peers.AGAIN: bare}
    for name in (peers.OURS, *peers.present()):
        gather = peers.fabric().all_gather if name == "fabric" else peers.accelerator(name).gather_for_metrics
        calling[name] = _call(gather, (scores, labels))
    return alternate({name: _repeat(call, calls) for name, call in calling.items()}, units=calls, rounds=rounds)


def _call(gather: Any, data: tuple[Tensor, Tensor]) -> Block:
    return lambda: gather(data)


def _repeat(call: Block, calls: int) -> Block:
    def block() -> None:
        for _ in range(calls):
            call()

    return block
