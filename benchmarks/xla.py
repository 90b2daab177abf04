"""``make bench-xla``: a step of ``xla`` beside the bare torch_xla loop, on XLA's CPU device, with graphs compiled.

Times are taken in one process, in turn (see ``pairs.py``). Graphs are counted in a process for each contender, since
two loops that record the same graph share it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import torch
import torch_xla
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pairs import alternate, compare
from drivetrain import Accelerator
from drivetrain_xla.watch import compile_count, read_count

BARE, AGAIN, OURS = "bare torch_xla", "bare torch_xla again", "drivetrain"
STEPS, WARM = 20, 12
"""Steps in a block; steps until everything that a loop compiles is compiled."""
FEATURES, CLASSES = 64, 10


@dataclass(frozen=True)
class Case:
    """One kind of step.

    Args:
        title: as in the table.
        hidden: width of the net; 3 layers.
        rows: of a batch.
        clip: clip the norm, and move a scheduler.
        accumulation: micro-batches in a step.
    """

    title: str
    hidden: int = 32
    rows: int = 16
    clip: bool = False
    accumulation: int = 1


CASES = (
    Case("AdamW, 4 thousand parameters"),
    Case("with clipping and a scheduler", clip=True),
    Case("with windows of 4", accumulation=4),
    Case("0.6 million parameters", hidden=512, rows=64),
)


def parts(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any, Tensor, Tensor]:
    """Model, optimizer, scheduler and a batch in host memory, the same for every contender."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, case.hidden), nn.ReLU(), nn.Linear(case.hidden, case.hidden), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(case.hidden, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return model, optimizer, scheduler, torch.randn(case.rows, FEATURES), torch.randint(CLASSES, (case.rows,))


def bare(case: Case) -> Callable[[int], None]:
    """The loop of torch_xla's own examples."""
    model, _, _, x, y = parts(case)
    device = torch_xla.device()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    x, y = x.to(device), y.to(device)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            for _ in range(case.accumulation):
                (F.cross_entropy(model(x), y) / case.accumulation).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            torch_xla.sync()
            if case.clip:
                scheduler.step()
        torch_xla.sync(wait=True)

    return steps


def ours(case: Case) -> Callable[[int], None]:
    """The same through ``Accelerator``."""
    accelerator = Accelerator(cpu=True, distributed_type="xla", gradient_accumulation_steps=case.accumulation)
    model, optimizer, scheduler, x, y = parts(case)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = x.to(accelerator.device), y.to(accelerator.device)

    def steps(count: int) -> None:
        for _ in range(count * case.accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if case.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if case.clip:
                    scheduler.step()
                optimizer.zero_grad()
        torch_xla.sync(wait=True)

    return steps


CONTENDERS = {BARE: bare, AGAIN: bare, OURS: ours}


def count(case: Case, contender: str) -> dict[str, int]:
    """Graphs that a contender compiles in its first steps and later, and values that it reads a hundred steps long."""
    steps = CONTENDERS[contender](case)
    steps(WARM)
    first, before = compile_count(), read_count()
    steps(100)
    return {"first": first, "later": compile_count() - first, "reads": read_count() - before}


def counted(index: int, contender: str) -> dict[str, int]:
    """:func:`count` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.xla", "--count", str(index), contender]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measure(index: int, case: Case, rounds: int) -> None:
    """One section of the table."""
    print(f"\n{case.title}, CPU time of a step")
    heads = f"{'median':>10s}{'more':>12s}{'quartiles':>22s}{'ratio':>8s}{'graphs':>9s}{'later':>7s}{'reads':>8s}"
    print(f"  {'':22s}{heads}")
    loops = {name: make(case) for name, make in CONTENDERS.items()}
    for steps in loops.values():
        steps(WARM)
    blocks = {name: (lambda steps=steps: steps(STEPS)) for name, steps in loops.items()}
    found = compare(alternate(blocks, units=STEPS, rounds=rounds), "cpu")
    for name, row in found.items():
        graphs = counted(index, name) if name != AGAIN else {"first": "", "later": "", "reads": ""}
        quartiles = f"{row.low * 1e6:+.0f} to {row.high * 1e6:+.0f} us"
        print(
            f"  {name:22s}{row.median * 1e6:7.0f} us{row.more * 1e6:+9.0f} us{quartiles:>22s}{row.ratio:8.3f}"
            f"{graphs['first']:>9}{graphs['later']:>7}{graphs['reads']:>8}"
        )


def main() -> None:
    """All sections, or the count of one contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--count", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        print(json.dumps(count(CASES[int(args.count[0])], args.count[1])))
        return
    print(
        f"torch {torch.__version__}, torch_xla {torch_xla.__version__}, XLA on the CPU. graphs: compiled in the first "
        f"{WARM} steps; later and reads: in the next 100."
    )
    for index, case in enumerate(CASES):
        measure(index, case, args.rounds)


if __name__ == "__main__":
    main()
