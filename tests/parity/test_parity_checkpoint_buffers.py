"""Buffers in a checkpoint are those of one moment of one rank, and the same as ``save_model`` writes."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drivetrain import Accelerator, load_config
from drivetrain.checkpoint import read_manifest
from drivetrain.checkpoint.tensors import read_tensor
from drivetrain_testing import spawn

ENGINES = {
    "ddp": {"distributed_type": "ddp"},
    "fsdp": {"distributed_type": "fsdp"},
    "deepspeed 1": {"distributed_type": "deepspeed", "deepspeed.zero_stage": 1},
    "deepspeed 3": {"distributed_type": "deepspeed", "deepspeed.zero_stage": 3},
    "tp": {"distributed_type": "megatron", "mesh.tp": 2},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))


def job(overrides, folder, blocking):
    """Trains on other data on each rank; whether the checkpoint has this rank's buffers, and ``save_model``'s."""
    config = load_config(overrides={"use_cpu": True, **overrides}, environ={})
    accelerator = Accelerator(config=config)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Processes that compute one batch together are given the same one.
    rank = accelerator.backend.topology.dp_rank
    torch.manual_seed(rank)
    for _ in range(3):
        x = torch.randn(6, 8) * (1 + rank)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):  # Whatever the engine has made the same on all ranks, these are not.
            buffer.add_(accelerator.process_index)
    accelerator.save_state(folder / "state", blocking=blocking)
    accelerator.wait_for_checkpoint()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    accelerator.save_model(model, folder / "model")
    accelerator.wait_for_everyone()
    entries, exported = read_manifest(folder / "state").tensors, load_file(folder / "model/model.safetensors")
    saved = {name: read_tensor(folder / "state", f"model.{name}", entries[f"model.{name}"]) for name in own}
    accelerator.end_training()
    as_exported = [name for name in own if not torch.equal(saved[name], exported[name])]
    return as_exported, [name for name in own if not torch.equal(saved[name], own[name])]


@pytest.mark.parametrize("blocking", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "world_size"),
    [
        ("ddp", 3),
        pytest.param("ddp", 4, marks=pytest.mark.slow),
        ("fsdp", 3),
        pytest.param("deepspeed 1", 3, marks=pytest.mark.slow),
        pytest.param("deepspeed 3", 3, marks=pytest.mark.slow),
        pytest.param("tp", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.turns(2)
def test_buffers_are_those_of_the_main_process(tmp_path, engine, world_size, blocking):
    outcomes = spawn(job, world_size, ENGINES[engine], tmp_path, blocking)
    assert [not_exported for not_exported, _ in outcomes] == [[]] * world_size
    assert outcomes[0][1] == [], "each is the main process's own"
    if engine == "ddp":
        assert all(others for _, others in outcomes[1:]), "elsewhere they differ, or this would show nothing"


def replaced(overrides, folder):
    """Names of buffers that are not loaded as the main process saved them."""
    accelerator = Accelerator(config=load_config(overrides={"use_cpu": True, **overrides}, environ={}))
    model = accelerator.prepare(build())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state of|strict=False passes over|the optimizer state of")
        accelerator.load_state(folder / "state", strict=False)
    entries = read_manifest(folder / "state").tensors
    wrong = [
        name
        for name, buffer in model.named_buffers()
        if not torch.equal(buffer, read_tensor(folder / "state", f"model.{name}", entries[f"model.{name}"]))
    ]
    accelerator.end_training()
    return wrong


def test_every_rank_loads_them(tmp_path):
    spawn(job, 3, ENGINES["ddp"], tmp_path, True)
    assert spawn(replaced, 4, ENGINES["ddp"], tmp_path) == [[]] * 4
