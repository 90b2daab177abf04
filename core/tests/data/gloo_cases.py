"""Holds what cases between real processes on gloo share: the backend, a loading context, and loaders of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.backend import Capabilities, RunSettings
from drivetrain.backends.base import DistributedBackend
from drivetrain.data.active import ActiveLoaders
from drivetrain.data.kept_batches import KeptBatches
from drivetrain.data.loader import LoadingContext, prepare_data_loader
from drivetrain.data.metrics import gather_for_metrics
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.topology import Mesh, ProcessInfo, Topology

WORLDS = [1, 2, 4]


class Pair(NamedTuple):
    x: Any
    y: Any


class Gloo(DistributedBackend):
    """The contract's own collectives on a process group of gloo; nothing to train."""

    capabilities = Capabilities()

    def start(self) -> Topology:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world > 1:
            dist.init_process_group("gloo")
        self.topology = Topology(ProcessInfo(rank, world, rank, world), Mesh({"dp_replicate": world}), "cpu", "gloo")
        return self.topology

    def prepare(self, model, optimizers=(), *, training=True):
        raise AssertionError

    def stop(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def run(case: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Run a case on this rank, with a loading context of these settings."""
    config = {key: kwargs.pop(key) for key in list(kwargs) if key in DataLoaderConfiguration.__dataclass_fields__}
    backend = Gloo(RunSettings())
    backend.start()
    context = LoadingContext(backend, DataLoaderConfiguration(**config), 5, False, ActiveLoaders(KeptBatches()))
    torch.manual_seed(backend.topology.rank)
    result = case(context, **kwargs)
    backend.stop()
    return result


def same(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results)
    return results[0]


def numbers(context, size=22, batch_size=2, **kwargs):
    return prepare_data_loader(DataLoader(range(size), batch_size=batch_size, **kwargs), context)


def gathered(loader, context) -> list[int]:
    return [value for batch in loader for value in gather_for_metrics(batch, context).tolist()]


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from range(self.size)
