"""A run saved under one backend, world and mesh goes on under another as if nothing had happened."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain_testing import spawn

Place = tuple[str, int, dict[str, int]]
HSDP: Place = ("fsdp", 4, {"dp_replicate": 2, "dp_shard": 2})
PLACES: dict[str, Place] = {
    "single": ("single", 1, {}),
    "ddp-2": ("ddp", 2, {}),
    "fsdp-1": ("fsdp", 1, {}),
    "fsdp-2": ("fsdp", 2, {}),
    "fsdp-4": ("fsdp", 4, {}),
    "hsdp-2x2": HSDP,
}
"""A further backend joins by one line."""

JOURNEYS = [
    ("single", "hsdp-2x2"), ("hsdp-2x2", "single"), ("ddp-2", "fsdp-2"), ("fsdp-2", "ddp-2"), ("fsdp-4", "hsdp-2x2"),
    ("hsdp-2x2", "fsdp-2"), ("fsdp-1", "fsdp-4"), ("fsdp-4", "fsdp-1"), ("ddp-2", "hsdp-2x2"), ("hsdp-2x2", "ddp-2"),
]  # fmt: skip
"""What the conformance kit does not do already."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(8)
        self.blocks[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x) * self.gain)


def run(place: Place, folder: str, steps: range, load: str | None) -> tuple[dict[str, Tensor], list[float]]:
    """Train these steps; save after the third under the folder's name, or load another one's first."""
    backend, _, mesh = place
    path = Path(folder) / f"config-{backend}-{os.environ.get('RANK', '0')}.yaml"
    path.write_text(json.dumps({"distributed_type": backend, "use_cpu": True, "mesh": mesh}))
    accelerator = Accelerator(config=path)
    torch.manual_seed(5 if load is None else 6)
    model: Any = Net()
    # Statistics of a batch are those of a rank's part of it: they would differ with the world.
    model.norm.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW([{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}], lr=0.02)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if load is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*random state.*")
            accelerator.load_state(load)
    losses = []
    for step in steps:
        words = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        mine = words.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = F.cross_entropy(model(mine), (mine + 1) % 11)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 2 and load is None:
            accelerator.save_state(f"{folder}/cut")
    state = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state, losses


End = tuple[dict[str, Tensor], list[float]]


def write(world: int, folder: str) -> dict[str, End]:
    """Every place of this world in turn: the whole run, saved in its middle."""
    found = {}
    for name, place in PLACES.items():
        if place[1] == world:
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
            found[name] = run(place, f"{folder}/{name}", range(6), None)
    return found


def read(world: int, folder: str) -> dict[tuple[str, str], End]:
    """Every journey that ends in this world in turn."""
    return {
        (source, target): run(PLACES[target], f"{folder}/{target}", range(3, 6), f"{folder}/{source}/cut")
        for source, target in JOURNEYS
        if PLACES[target][1] == world
    }


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, End], dict[tuple[str, str], End]]:
    """What the main process saw of each whole run, and of each resumed one: one job for each world."""
    folder = str(tmp_path_factory.mktemp("journeys"))
    worlds = sorted({place[1] for place in PLACES.values()})
    written = [spawn(write, world, world, folder)[0] for world in worlds]
    resumed = [spawn(read, world, world, folder)[0] for world in worlds]
    return {k: v for each in written for k, v in each.items()}, {k: v for each in resumed for k, v in each.items()}


@pytest.mark.parametrize(("source", "target"), JOURNEYS)
@pytest.mark.gate("single-hsdp-2x2", "fsdp-4-fsdp-1")
def test_journeys(source: str, target: str, journeys: Any) -> None:
    whole, losses = journeys[0][source]
    resumed, rest = journeys[1][source, target]
    torch.testing.assert_close(rest, losses[3:], rtol=0, atol=1e-6)
    assert list(whole) == list(resumed)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=2e-6, msg=name)
