"""Ranks that come apart say so also where torchrun or Slurm has started them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

APART = """
    import time, torch
    from torch.utils.data import DataLoader, TensorDataset
    from drivetrain import Accelerator, load_config
    monitor = {"interval_seconds": 0.1}
    accelerator = Accelerator(config=load_config(overrides={"use_cpu": True, "rank_monitor": monitor}))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.ones(160, 4)), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, (x,) in enumerate(batches):
        if step == 3 and accelerator.process_index == 1:
            continue
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    accelerator.end_training()
"""


def started(command, environment, folder):
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment, cwd=folder, stderr=subprocess.PIPE, text=True
    )


def by_torchrun(script, environment, folder):
    options = ("--nproc-per-node", 2, "--standalone")
    return [started(("-m", "torch.distributed.run", *options, script), environment, folder)]


def by_slurm(script, environment, folder):
    """As ``srun -n 2`` sets the environment of each task."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),  # the port follows from it
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return [started((script,), environment | task, folder) for task in tasks]


@pytest.mark.parametrize("start", [by_torchrun, by_slurm])
@pytest.mark.gate("by_torchrun")
def test_ranks_that_come_apart_are_named_under_another_launcher(start, script, clean_environment, tmp_path):
    processes = start(script(APART), clean_environment(OMP_NUM_THREADS="1"), tmp_path)
    words = "".join(process.communicate(timeout=170)[1] for process in processes)
    assert all(process.returncode for process in processes), words
    assert "ranks are apart since call" in words
    assert "in optimizer step 3:" in words
    for rank, batch in ((0, 3), (1, 4)):
        assert f"rank {rank}: backward at job.py:14, batch {batch} of epoch 0" in words
    assert "Let all ranks decide alike" in words
