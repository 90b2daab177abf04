"""A backend that saves in shards needs the memory of about one parameter more, to save and to load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, load_config
from drivetrain.registry import get_registry
from drivetrain_testing import spawn
from drivetrain_testing.resident_memory import ResidentMemory

MEGABYTES, PARAMETERS = 128, 8


def sharding() -> list[str]:
    """Every installed backend that declares ``sharded_save``."""
    registry = get_registry()
    names = [report.name for report in registry.reports() if report.ready]
    return [name for name in names if registry.info(name).capabilities.sharded_save]


def grown(backend, folder):
    """MiB beyond the run's own, at their highest, during a second save and a load."""
    overrides = {"distributed_type": backend, "use_cpu": True}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    width = MEGABYTES * 256 // PARAMETERS
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(1024, width, bias=False) for _ in range(PARAMETERS))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.save_state(folder)
    with ResidentMemory() as saving:
        accelerator.save_state(folder)
    with ResidentMemory() as loading:
        accelerator.load_state(folder)
    accelerator.end_training()
    return saving.grown / 2**20, loading.grown / 2**20


@pytest.mark.parametrize("backend", sharding())
def test_memory_beyond_the_run_is_about_one_parameter(backend, tmp_path):
    # A rank holds 64 MiB, 8 of each parameter; one that copied its whole part, or gathered a parameter, would show it.
    for saving, loading in spawn(grown, 2, backend, tmp_path / "ckpt"):
        assert saving < 2.5 * MEGABYTES / PARAMETERS / 2, saving
        assert loading < 2.5 * MEGABYTES / PARAMETERS / 2, loading
