"""A short training, as a launcher starts it: ``python xla_script.py losses.json``; the main process writes losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xla_jobs as jobs

from drivetrain import Accelerator


def main(path: str) -> None:
    """Train two epochs under whatever the environment says."""
    accelerator = Accelerator()
    run = jobs.Run(accelerator)
    for _ in range(2):
        run.epoch()
    losses, world = run.losses(), accelerator.num_processes
    if accelerator.is_main_process:
        Path(path).write_text(json.dumps({"losses": losses, "world": world}), encoding="utf-8")
    accelerator.end_training()


def by_torch_xla(_: int, path: str) -> None:
    """What ``torch_xla.launch`` calls in each of its processes."""
    main(path)


if __name__ == "__main__":
    if sys.argv[1] == "--torch_xla":
        import torch_xla

        torch_xla.launch(by_torch_xla, args=(sys.argv[2],))
    else:
        main(sys.argv[1])
