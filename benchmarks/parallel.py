"""What ``megatron`` costs: a step under tensor or pipeline parallelism, against torch's own calls written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate
from benchmarks.sharded import high_water

BARE_TOO = (peers.FOREACH, peers.FUSED)
BARE, OURS, AGAIN, SINGLE = peers.BARE, peers.OURS, peers.AGAIN, "one process, the whole model"


@dataclass(frozen=True)
class ParallelCase:
    """A model over two ranks.

    Args:
        axis: ``tp`` or ``pp``.
        width: of the residual stream; blocks are four times as wide inside.
        blocks: how many.
        rows: of a batch.
        micro_batches: of a pipeline, in a batch.
    """

    axis: str
    width: int = 512
    blocks: int = 6
    rows: int = 256
    micro_batches: int = 4

    @property
    def title(self) -> str:
        """As in the table."""
        parts = f", {self.micro_batches} micro-batches, 1f1b" if self.axis == "pp" else ""
        return f"{self.axis} over 2 processes, {self.blocks} blocks of width {self.width}{parts}"


class FeedForward(nn.Module):
    """The half of a transformer's block that holds two thirds of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Network(nn.Module):
    """Blocks one after the other."""

    def __init__(self, case: ParallelCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(FeedForward(case.width) for _ in range(case.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure(case: ParallelCase, rounds: int) -> dict[str, Samples]:
    """Wall and CPU seconds of a step. Runs on both ranks."""
    peers.begin()
    batch = _batch(case)
    blocks = {name: _MAKE[name](case, batch) for name in (BARE, *BARE_TOO, OURS, AGAIN)}
    return alternate(blocks, units=1, rounds=rounds)


def peak(name: str, case: ParallelCase, steps: int) -> float:
    """Bytes that this rank's memory grows by at most, the model's construction included."""
    peers.begin()
    before = high_water()
    step = _MAKE[name](case, _batch(case))
    for _ in range(steps):
        step()
    return high_water() - before


def _batch(case: ParallelCase) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(case.rows, case.width), torch.randn(case.rows, case.width)


def _adam(module: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    if not implementation:
        return torch.optim.AdamW(module.parameters(), lr=1e-4)
    # These implementations take no mixture of DTensors and plain tensors, so an expert makes a group of each.
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in module.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": found} for found in kinds.values()], lr=1e-4, **implementation)


def _plain_loop(model: Any, optimizer: Any, backward: Callable[[Tensor], Any], batch: tuple[Tensor, Tensor]) -> Block:
    x, y = batch

    def step() -> None:
        backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(case: ParallelCase, batch: tuple[Tensor, Tensor]) -> Block:
    degree = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}[case.axis]
    from drivetrain import Accelerator, load_config

    overrides = {"distributed_type": "megatron", "use_cpu": True, f"megatron.{degree}": 2}
    overrides |= {"megatron.num_micro_batches": case.micro_batches} if case.axis == "pp" else {}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    network = Network(case)
    model, optimizer = accelerator.prepare(network, _adam(network))
    return _plain_loop(model, optimizer, accelerator.backward, batch)


def _bare(case: ParallelCase, batch: tuple[Tensor, Tensor], **implementation: bool) -> Block:
    network = Network(case)
    if case.axis == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for block in network.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return _plain_loop(network, _adam(network, **implementation), torch.Tensor.backward, batch)
    return _bare_pipeline(case, network, batch, **implementation)


def _bare_pipeline(
    case: ParallelCase, network: Network, batch: tuple[Tensor, Tensor], **implementation: bool
) -> Block:
    rank, half = dist.get_rank(), case.blocks // 2
    mine = nn.Sequential(*list(network.blocks)[rank * half : (rank + 1) * half])
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.micro_batches, loss_fn=F.mse_loss)
    optimizer = _adam(mine, **implementation)
    x, y = batch

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[Tensor] = []
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _single(case: ParallelCase, batch: tuple[Tensor, Tensor]) -> Block:
    network = Network(case)
    return _plain_loop(network, _adam(network), torch.Tensor.backward, batch)


_MAKE: dict[str, Callable[[ParallelCase, tuple[Tensor, Tensor]], Block]] = {
    BARE: _bare,
    peers.FOREACH: partial(_bare, foreach=True),
    peers.FUSED: partial(_bare, fused=True),
    OURS: _ours,
    AGAIN: _bare,
    SINGLE: _single,
}
