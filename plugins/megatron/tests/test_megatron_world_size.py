"""Losses that a script multiplies by the processes of the run, of which some share a model: named once, by rank 0."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_testing import spawn


def warnings_of(folder, what):
    """Return what a rank logs of two steps."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("drivetrain").addHandler(handler)
    file = folder / "train.yaml"
    accelerator = Accelerator(config=file, split_batches=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    loader = DataLoader(TensorDataset(torch.randn(24, 8), torch.arange(24) % 4), batch_size=12)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        if what == "num_processes":
            loss = loss * accelerator.num_processes
        elif what == "data_parallel_size":
            assert accelerator.num_processes == accelerator.data_parallel_size * 2
            loss = loss * accelerator.data_parallel_size
        elif what == "a number":
            loss = loss * 2
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    logging.getLogger("drivetrain").removeHandler(handler)
    return [each for each in seen if "accelerator.num_processes" in each]


TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("ranks", "section", "what"),
    [
        (2, TP, "num_processes"), (2, TP, "data_parallel_size"), (2, TP, "a number"), (4, TP, "num_processes"),
        (2, PP, "num_processes"), (2, PP, "data_parallel_size"),
    ],
)  # fmt: skip
def test_a_loss_times_all_processes_is_named(tmp_path, ranks, section, what):
    config = {"distributed_type": "megatron", "use_cpu": True, "megatron": section}
    (tmp_path / "train.yaml").write_text(json.dumps(config), encoding="utf-8")
    first, *others = spawn(warnings_of, ranks, tmp_path, what)
    assert not any(others)
    assert len(first) == (what == "num_processes")
    if first:
        assert f"multiplied by {ranks}, which accelerator.num_processes is" in first[0]
        assert "multiply by accelerator.data_parallel_size" in first[0]
