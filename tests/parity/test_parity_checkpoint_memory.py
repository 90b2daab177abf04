"""A backend that saves in shards needs the memory of about one parameter more, to save and to load."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, load_config
from drivetrain.registry import get_registry
from drivetrain_testing import spawn

MEGABYTES, PARAMETERS = 128, 8


def sharding() -> list[str]:
    """Every installed backend that declares ``sharded_save``."""
    registry = get_registry()
    names = [report.name for report in registry.reports() if report.ready]
    return [name for name in names if registry.info(name).capabilities.sharded_save]


class Sampler:
    """Watches this process's anonymous resident memory from a thread."""

    def __enter__(self):
        self._stop = threading.Event()
        self._first = self._highest = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.grown = max(self._highest, self._now()) - self._first

    def _watch(self):
        while not self._stop.wait(0.0005):
            self._highest = max(self._highest, self._now())

    @staticmethod
    def _now():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
        raise AssertionError


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
    with Sampler() as saving:
        accelerator.save_state(folder)
    with Sampler() as loading:
        accelerator.load_state(folder)
    accelerator.end_training()
    return saving.grown, loading.grown


@pytest.mark.parametrize("backend", sharding())
def test_memory_beyond_the_run_is_about_one_parameter(backend, tmp_path):
    # A rank holds 64 MiB, 8 of each parameter; one that copied its whole part, or gathered a parameter, would show it.
    for saving, loading in spawn(grown, 2, backend, tmp_path / "ckpt"):
        assert saving < 2.5 * MEGABYTES / PARAMETERS / 2, saving
        assert loading < 2.5 * MEGABYTES / PARAMETERS / 2, loading
