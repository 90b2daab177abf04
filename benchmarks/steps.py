"""What a training step costs: the same small network trained by each contender, batches at hand already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepCase:
    """A way to train.

    Args:
        world: ranks, in DDP when there are several.
        accumulation: micro-batches in a window; the unit measured is one micro-batch.
        bf16: forward under autocast, output in float32.
        hidden: width of the three layers.
        rows: size of a micro-batch.
        clip: clip gradients to norm 1, and move a scheduler.
        fused: every contender's optimizer is torch's fused one.
    """

    world: int = 1
    accumulation: int = 1
    bf16: bool = False
    hidden: int = 64
    rows: int = 16
    clip: bool = False
    fused: bool = False

    @property
    def title(self) -> str:
        """As in the table."""
        parts = ["1 process" if self.world == 1 else f"{self.world} processes DDP", f"width {self.hidden}"]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        parts += ["bf16"] if self.bf16 else []
        parts += ["fused=True"] if self.fused else []
        return ", ".join(parts + (["clipping and scheduler"] if self.clip else []))


def measure(case: StepCase, micro_batches: int, rounds: int) -> dict[str, Samples]:
    """All contenders on one case. Runs on every rank; blocks of ``micro_batches``, a multiple of the window."""
    peers.begin()
    torch.manual_seed(0)
    batches = [(torch.randn(case.rows, case.hidden), torch.randn(case.rows, case.hidden)) for _ in range(micro_batches)]
    blocks: dict[str, Block] = {
        peers.BARE: bare(case, batches),
        peers.OURS: prepared(peers.OURS, case, batches),
        peers.AGAIN: bare(case, batches),
    }
    for name in peers.present():
        blocks[name] = with_fabric(case, batches) if name == "fabric" else prepared(name, case, batches)
    return alternate(blocks, units=micro_batches, rounds=rounds)


def network(case: StepCase) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler, the same for all."""
    torch.manual_seed(0)
    width = case.hidden
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.fused or None)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _constant)


def _constant(_: int) -> float:
    return 1.0


def bare(case: StepCase, batches: Batches) -> Block:
    """The loop that a user writes without a wrapper."""
    model, optimizer, scheduler = network(case)
    window = case.accumulation
    run: Callable[..., Any] = DistributedDataParallel(model) if case.world > 1 else model
    quiet = run.no_sync if isinstance(run, DistributedDataParallel) else nullcontext

    def forward_backward(x: Tensor, y: Tensor) -> None:
        if case.bf16:
            with torch.autocast("cpu", torch.bfloat16):
                output = run(x)
            output = output.float()
        else:
            output = run(x)
        loss = F.mse_loss(output, y)
        (loss if window == 1 else loss / window).backward()  # type: ignore[no-untyped-call]

    def update() -> None:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if case.clip:
            scheduler.step()
        optimizer.zero_grad()

    def every_batch() -> None:
        for x, y in batches:
            forward_backward(x, y)
            update()

    def windows() -> None:
        for index, (x, y) in enumerate(batches, 1):
            if index % window:
                with quiet():
                    forward_backward(x, y)
                continue
            forward_backward(x, y)
            update()

    return every_batch if window == 1 else windows


def prepared(name: str, case: StepCase, batches: Batches) -> Block:
    """The loop with an ``Accelerator``: the same lines for ours and for the peer's."""
    accelerator = peers.accelerator(
        name, mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.accumulation
    )
    model, optimizer, scheduler = accelerator.prepare(*network(case))

    def every_batch() -> None:
        for x, y in batches:
            accelerator.backward(F.mse_loss(model(x), y))
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if case.clip:
                scheduler.step()
            optimizer.zero_grad()

    def windows() -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return every_batch if case.accumulation == 1 else windows


def with_fabric(case: StepCase, batches: Batches) -> Block:
    """The loop with ``Fabric``, which leaves windows to the script."""
    fabric = peers.fabric("bf16-mixed" if case.bf16 else "32-true")
    plain_model, plain_optimizer, scheduler = network(case)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    window = case.accumulation

    def every_batch() -> None:
        for x, y in batches:
            fabric.backward(F.mse_loss(model(x), y))
            if case.clip:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            if case.clip:
                scheduler.step()
            optimizer.zero_grad()

    def windows() -> None:
        for index, (x, y) in enumerate(batches, 1):
            waits = index % window != 0
            with fabric.no_backward_sync(model, enabled=waits):
                fabric.backward(F.mse_loss(model(x), y) / window)
            if not waits:
                optimizer.step()
                optimizer.zero_grad()

    return every_batch if window == 1 else windows
