"""Checkpoints of other libraries, made by those libraries; run as a script in an environment that has them.

``python foreign_makers.py accelerate|fabric FOLDER`` trains the model below for three steps, saves, trains three more,
and prints the later losses as JSON. Imported, it gives the same model and the same losses to a run of ours.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    """Tied weights, statistics, a frozen part."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 6).requires_grad_(False)
        self.back = nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.back(self.frozen(self.norm(torch.relu(self.body(self.embed(x)))))))


def build(seed=0):
    torch.manual_seed(seed)
    net = Net()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    decay, rest = ([each for each in trained if (each.dim() > 1) is wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], 0.01)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(net, optimizer, scheduler, backward, first, steps=3):
    losses = []
    for step in range(first, first + steps):
        x = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(x), (x + 1) % 10)
        backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = accelerator.prepare(*build())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.value = 7
    train(net, optimizer, scheduler, accelerator.backward, 0)
    accelerator.save_state(str(folder / "safe"))
    accelerator.save_state(str(folder / "pickled"), safe_serialization=False)
    numbers = torch.rand(2).tolist()
    return train(net, optimizer, scheduler, accelerator.backward, 3), numbers


def fabric(folder):
    from lightning_fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    engine.launch()
    net, optimizer, scheduler = build()
    net, optimizer = engine.setup(net, optimizer)
    train(net, optimizer, scheduler, engine.backward, 0)
    engine.save(folder / "run.ckpt", {"model": net, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3})
    return train(net, optimizer, scheduler, engine.backward, 3), None


def resume_job(path, registered=False):
    """Load a converted checkpoint into a run that began elsewhere: later losses, numbers drawn, the object, steps."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = accelerator.prepare(*build(seed=9))
    counter = Counter()
    if registered:
        accelerator.register_for_checkpointing(counter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state.*")
        accelerator.load_state(path)
    numbers = torch.rand(2).tolist()
    losses = train(net, optimizer, scheduler, accelerator.backward, 3)
    result = losses, numbers, counter.value, accelerator.step
    accelerator.end_training()
    return result


def sharded_job(folder, layout):
    """FSDP2 by bare torch, saved the way Accelerate and Fabric do it; the later losses."""
    dist.init_process_group("gloo")
    net, _, _ = build()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    decay, rest = ([each for each in trained if (each.dim() > 1) is wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train(net, optimizer, scheduler, torch.Tensor.backward, 0)
    options = StateDictOptions(full_state_dict=layout == "full", cpu_offload=layout == "full")
    model_state = get_model_state_dict(net, options=options)
    optimizer_state = get_optimizer_state_dict(net, optimizer, options=options)
    main = dist.get_rank() == 0
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
    if layout == "full":
        if main:
            torch.save(model_state, folder / "pytorch_model_fsdp.bin")
            torch.save(optimizer_state, folder / "optimizer.bin")
    elif layout == "sharded":
        dcp.save({"model": model_state}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": optimizer_state}, checkpoint_id=folder / "optimizer_0")
    else:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        if main:
            torch.save({"epoch": 3, "scheduler": scheduler.state_dict()}, folder / "meta.pt")
    if main and layout != "fabric":
        torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    losses = train(net, optimizer, scheduler, torch.Tensor.backward, 3)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    kind, target = sys.argv[1:]
    Path(target).mkdir(parents=True, exist_ok=True)
    print(json.dumps(globals()[kind](Path(target))))
