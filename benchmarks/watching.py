"""What a step costs with ``desync_watchdog`` and with ``save_on_interrupt``, two ranks in DDP."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate
from benchmarks.steps import Batches, StepCase, bare, network
from drivetrain.distributed.watchdog import unwatched

WATCHED = "drivetrain, desync_watchdog"
SAVING = "drivetrain, save_on_interrupt"


def measure(steps: int, rounds: int) -> dict[str, Samples]:
    """All contenders. Runs on every rank; the unit is a step, of which the watchdog compares ``backward``."""
    peers.begin()
    case = StepCase(world=2)
    torch.manual_seed(0)
    batches = [(torch.randn(case.rows, case.hidden), torch.randn(case.rows, case.hidden)) for _ in range(steps)]
    with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
        blocks: dict[str, Block] = {
            peers.BARE: bare(case, batches),
            peers.OURS: _unwatched(_ours(case, batches)),
            peers.AGAIN: bare(case, batches),
            SAVING: _unwatched(_ours(case, batches, save_on_interrupt=True, project_dir=folder)),
            WATCHED: _ours(case, batches, desync_watchdog=True),
        }
        return alternate(blocks, units=steps, rounds=rounds)


def _ours(case: StepCase, batches: Batches, **settings: object) -> Block:
    accelerator = peers.accelerator(peers.OURS, **settings)
    model, optimizer, _ = accelerator.prepare(*network(case))

    def block() -> None:
        for x, y in batches:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return block


def _unwatched(block: Block) -> Block:
    """A process has one watchdog, which is another contender's."""

    def run() -> None:
        with unwatched():
            block()

    return run
