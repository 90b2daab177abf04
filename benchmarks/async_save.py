"""How long the training loop waits for ``save_state(blocking=False)``, against a save that blocks.

``python benchmarks/async_save.py [--megabytes 64] [--rounds 12] [--folder DIR] [--backend ddp] [--processes 2]`` prints
medians and the ratio for each run; the target is at most 20 %. The copy goes into memory that is kept, so the first
save, which allocates it, is told apart. Between two saves the loop trains until the write is over, as a real one would.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

TARGET = 0.2


def measure(backend: str, megabytes: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each call on this rank, the two kinds in turn: ``blocking``, ``waits``, and the first of ``waits``."""
    from drivetrain import Accelerator, load_config

    overrides = {"distributed_type": backend, "use_cpu": True}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    torch.manual_seed(0)
    # Parameters and Adam's two moments: three times the parameters are saved.
    width = int((megabytes * 1e6 / 3 / 4 / 8) ** 0.5)
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(torch.randn(4, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    times: dict[str, list[float]] = {"blocking": [], "waits": [], "first": []}
    for number in range(rounds + 1):
        for kind in ("blocking", "waits"):
            path = Path(folder) / f"{kind}-{number}"
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            accelerator.save_state(path, blocking=kind == "blocking")
            spent = time.perf_counter() - began
            step()
            accelerator.wait_for_checkpoint()
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                shutil.rmtree(path)
            if number:
                times[kind].append(spent)
            elif kind == "waits":
                times["first"].append(spent)
    accelerator.end_training()
    return times


def main() -> None:
    """Measure and print."""
    from drivetrain_testing import spawn

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256], help="size of what is saved")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    parser.add_argument("--backend", default="ddp")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.backend}, {options.processes} process(es), CPU; medians over {options.rounds} saves, main process")
    print(f"{'saved':>8} {'blocking':>11} {'loop waits':>11} {'first time':>11} {'ratio':>7}  target {TARGET:.0%}")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(prefix="drivetrain-bench-", dir=options.folder) as folder:
            job = (options.backend, megabytes, options.rounds, folder)
            times = spawn(measure, options.processes, *job, timeout=600)[0]
        blocking, waits = statistics.median(times["blocking"]), statistics.median(times["waits"])
        cells = [f"{1000 * value:8.1f} ms" for value in (blocking, waits, times["first"][0])]
        verdict = "met" if waits <= TARGET * blocking else "MISSED"
        print(f"{megabytes:5} MB {' '.join(cells)} {waits / blocking:7.1%}  {verdict}")


if __name__ == "__main__":
    main()
