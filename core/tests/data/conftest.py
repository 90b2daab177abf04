"""Loaders of any rank of any world, in this process: they do not communicate, and a collective here raises."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.backend import Backend, RunSettings
from drivetrain.data.active import ActiveLoaders
from drivetrain.data.drawing import Board
from drivetrain.data.kept_batches import KeptBatches
from drivetrain.data.loader import LoadingContext, prepare_data_loader
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.topology import Mesh, ProcessInfo, Topology


class Alone(Backend):
    """A place in a job without the job."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(RunSettings())
        self.topology = Topology(ProcessInfo(rank, world, rank, world), Mesh({"dp_replicate": world}), "cpu", None)

    def start(self):
        return self.topology

    def prepare(self, model, optimizers=(), *, training=True):
        raise AssertionError

    def stop(self):
        pass

    def broadcast_object(self, obj, src=0):
        # Agreement on a seed: the ranks of these tests are built alike.
        return obj

    def gather(self, tensor):
        raise AssertionError("a collective")

    gather_object = barrier = broadcast = reduce = autocast = synchronise_batch_norm = gather


class DictBoard(Board):
    """Agreement of ranks that run in one process, rank 0 before the others."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self._rank, self._shared = rank, shared

    def agree(self, key: str, value: Any) -> Any:
        if self._rank == 0:
            self._shared[key] = value
            return None
        return None if self._shared[key] == value else self._shared[key]


def make_context(
    rank: int = 0, world: int = 1, *, seed: int = 5, shared: dict[str, Any] | None = None, **config: Any
) -> LoadingContext:
    board = DictBoard(rank, {} if shared is None else shared) if world > 1 else None
    return LoadingContext(
        Alone(rank, world), DataLoaderConfiguration(**config), seed, False, ActiveLoaders(KeptBatches()), board=board
    )


@pytest.fixture
def context():
    return make_context


@pytest.fixture
def ranks():
    """``ranks(build, world, **config)``: the prepared loader of each rank of a world."""

    def make(build, world: int = 1, **config: Any) -> list:
        shared: dict[str, Any] = {}
        contexts = [make_context(rank, world, shared=shared, **config) for rank in range(world)]
        return [prepare_data_loader(build(), context) for context in contexts]

    return make


class Numbers(Dataset):
    """Each sample is its index."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Buckets(Sampler):
    """A batch sampler with batches of several sizes."""

    def __init__(self, sizes) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


@pytest.fixture
def numbers():
    return Numbers


@pytest.fixture
def buckets():
    return Buckets


@pytest.fixture
def shuffled():
    """``shuffled(**kwargs)`` builds loaders of 22 samples in batches of 2."""
    return lambda **kwargs: lambda: DataLoader(Numbers(), batch_size=2, shuffle=True, **kwargs)


@pytest.fixture
def run():
    """``run(loaders, steps)``: iterate all ranks in step, leave after so many batches; what counted, in order."""

    def iterate(loaders, steps: int | None = None) -> list[int]:
        shown: list[int] = []
        iterators = [iter(loader) for loader in loaders]
        done = 0
        while steps is None or done < steps:
            step = [next(iterator, None) for iterator in iterators]
            if all(batch is None for batch in step):
                break
            for loader, batch in zip(loaders, step, strict=True):
                shown += [] if batch is None else real_rows(loader, batch)
            done += 1
        return shown

    return iterate


def real_rows(loader, batch) -> list[int]:
    info = loader._context.active.current
    assert info.loader is loader
    real = info.rows.real[loader._share_rank]
    if info.rows.whole:
        return batch.tolist() if real else []
    assert len(batch) == info.rows.loaded[loader._share_rank]
    return batch[:real].tolist()
