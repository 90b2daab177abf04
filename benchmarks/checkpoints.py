"""What a checkpoint costs: a model with its Adam state, saved and loaded, against torch's own ways.

``torch.distributed.checkpoint`` is what the others are compared with: like ours it syncs to disk what it wrote.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks import peers
from benchmarks.pairs import Block, Samples, alternate

SAVED, SYNCED = "torch.save, torch.load", "torch.save, synced to disk"


def measure(megabytes: int, rounds: int) -> dict[str, dict[str, Samples]]:
    """``{"save": ..., "load": ...}``, one process; the unit is one call.

    Args:
        megabytes: size of the parameters; Adam's state has twice as much.
        rounds: how often each contender saves and loads.
    """
    peers.begin()
    with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
        saves: dict[str, Block] = {}
        loads: dict[str, Block] = {}
        saves[peers.BARE], loads[peers.BARE] = _distributed(Path(folder) / "dcp", megabytes)
        saves[SAVED], loads[SAVED] = _bare(Path(folder) / "bare.pt", megabytes, sync=False)
        saves[SYNCED], _ = _bare(Path(folder) / "synced.pt", megabytes, sync=True)
        for name in (peers.OURS, *peers.present()):
            make = _fabric if name == "fabric" else _prepared
            saves[name], loads[name] = make(name, Path(folder) / name, megabytes)
        return {
            "save": alternate(saves, units=1, rounds=rounds, warmup=1),
            "load": alternate(loads, units=1, rounds=rounds, warmup=1),
        }


def _trained(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Eight square layers and an Adam."""
    torch.manual_seed(0)
    width = int((megabytes * 1e6 / 4 / 8) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def _step(model: Any, optimizer: Any, backward: Any) -> None:
    """One step, so that the optimizer has its state."""
    width = next(iter(model.parameters())).shape[0]
    backward(model(torch.randn(4, width)).square().mean())
    optimizer.step()


def _bare(path: Path, megabytes: int, *, sync: bool) -> tuple[Block, Block]:
    model, optimizer = _trained(megabytes)
    _step(model, optimizer, torch.Tensor.backward)

    def save() -> None:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _distributed(folder: Path, megabytes: int) -> tuple[Block, Block]:
    model, optimizer = _trained(megabytes)
    _step(model, optimizer, torch.Tensor.backward)

    def state() -> dict[str, Any]:
        found_model, found_optimizer = get_state_dict(model, optimizer)
        return {"model": found_model, "optimizer": found_optimizer}

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        dcp_save(state(), checkpoint_id=folder, no_dist=True)

    def load() -> None:
        found = state()
        dcp_load(found, checkpoint_id=folder, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return save, load


def _prepared(name: str, folder: Path, megabytes: int) -> tuple[Block, Block]:
    accelerator = peers.accelerator(name)
    model, optimizer = accelerator.prepare(*_trained(megabytes))
    _step(model, optimizer, accelerator.backward)

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        accelerator.save_state(str(folder))

    return save, lambda: accelerator.load_state(str(folder))


def _fabric(_: str, folder: Path, megabytes: int) -> tuple[Block, Block]:
    fabric = peers.fabric()
    model, optimizer = fabric.setup(*_trained(megabytes))
    _step(model, optimizer, fabric.backward)
    path, state = folder.with_suffix(".ckpt"), {"model": model, "optimizer": optimizer}
    return lambda: fabric.save(path, state), lambda: fabric.load(path, state)
