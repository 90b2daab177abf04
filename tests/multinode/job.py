"""What the machines train: a small regression that saves, resumes, and writes down every sample that it trains on.

``python job.py FOLDER [hold]``. The main process appends a line to ``FOLDER/log.jsonl`` for each step: its number, the
ids of all samples of the global batch, their mean loss, the world. Every process appends a line about itself to
``FOLDER/places.jsonl``. A run that did not resume and is told to hold goes no further than step ``hold``, and keeps
meeting the other ranks there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain.errors import CheckpointNotFoundError
from drivetrain.utils import ProjectConfiguration

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 96, 12, 2, 3
STEPS = SAMPLES // BATCH * EPOCHS


class Numbers(Dataset):
    """Sample ``i`` is its number and a point that follows from it."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(4, generator=generator)


def append(path: Path, line: dict) -> None:
    """One write, which a kill cannot cut in two."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def train(folder: Path, hold: int) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
        split_batches=True,
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    place = {name: os.environ.get(name) for name in names}
    append(folder / "places.jsonl", {**place, "machine": os.environ.get("MACHINE"), "pid": os.getpid()})
    done, first_epoch = 0, 0
    try:
        accelerator.load_state()
    except CheckpointNotFoundError:
        resumed = False
    else:
        resumed = True
        done = int(optimizer.state_dict()["state"][0]["step"])
        first_epoch = done // (SAMPLES // BATCH)
    for _ in range(first_epoch, EPOCHS):
        for ids, points in loader:
            while hold == done and not resumed:
                accelerator.wait_for_everyone()
                time.sleep(0.05)
            losses = (model(points).squeeze(1) - points.sum(1)).pow(2)
            accelerator.backward(losses.mean())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            trained, losses = accelerator.gather_for_metrics((ids, losses.detach()))
            if accelerator.is_main_process:
                line = {"step": done, "ids": trained.tolist(), "loss": losses.mean().item()}
                append(folder / "log.jsonl", {**line, "world": accelerator.num_processes, "resumed": resumed})
            if done % SAVE_EVERY == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
