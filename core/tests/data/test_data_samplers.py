"""Samplers of every kind: followed alike by every rank, reproducible from seed and epoch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain.data.loader import prepare_data_loader

N = 22


class Backwards(Sampler):
    """A sampler of the user's own, with a random start from torch's global state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        start = int(torch.randint(self.size, ()))
        yield from ((start - index) % self.size for index in range(self.size))


class Endless(Sampler):
    """No length, no end."""

    def __iter__(self):
        while True:
            yield from torch.randperm(N).tolist()


SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(0, N, 2)),
    "weighted": lambda: WeightedRandomSampler([1.0] * N, 30),
    "weighted, seeded": lambda: WeightedRandomSampler([1.0] * N, 30, generator=torch.Generator().manual_seed(4)),
    "replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=30),
    "num_samples": lambda: RandomSampler(range(N), num_samples=50),
    "own": lambda: Backwards(N),
    "list": lambda: [3, 1, 4, 1, 5, 9, 2, 6],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_is_followed_alike_by_every_rank(ranks, name, run, numbers):
    def build():
        return DataLoader(numbers(), batch_size=2, sampler=SAMPLERS[name]())

    torch.manual_seed(0)
    alone = ranks(build)
    epochs = [run(alone), run(alone)]
    assert len(epochs[0]) == len(SAMPLERS[name]())
    torch.manual_seed(1)
    shared = ranks(build, 4)
    assert [run(shared), run(shared)] == epochs
    if name != "list":
        assert epochs[0] != epochs[1]


def test_a_samplers_set_epoch_is_called(context, numbers):
    sampler = Backwards(N)
    loader = prepare_data_loader(DataLoader(numbers(), sampler=sampler), context())
    list(loader)
    list(loader)
    assert sampler.epochs == [0, 1]


def test_a_sampler_draws_nothing_from_the_training_randomness(context, numbers):
    loader = prepare_data_loader(DataLoader(numbers(), sampler=Backwards(N), generator=torch.Generator()), context())
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_endless_sampler_is_read_as_far_as_needed(ranks, run, numbers):
    def build():
        return DataLoader(numbers(), batch_size=2, sampler=Endless())

    alone = run(ranks(build), 24)
    assert run(ranks(build, 2), 12) == alone
    assert Counter(alone[:44]) == Counter(dict.fromkeys(range(N), 2))
    (loader,) = ranks(build)
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_a_distributed_sampler_is_not_applied_twice(ranks, run, numbers):
    sampler = DistributedSampler(numbers(), num_replicas=2, rank=1, shuffle=False)
    with pytest.warns(UserWarning, match="DistributedSampler, which would share its samples out a second time"):
        loaders = ranks(lambda: DataLoader(numbers(), sampler=sampler), 2)
    assert run(loaders) == list(range(N))
    with pytest.warns(UserWarning, match="DistributedSampler"):
        loaders = ranks(lambda: DataLoader(numbers(), sampler=DistributedSampler(numbers(), 2, 1)), 2)
    assert sorted(run(loaders)) == list(range(N))


def test_the_samplers_of_torchdata_are_known(ranks, run):
    """Its stateful loader brings twins of torch's classes; they are cut by samples too, not taken as batches."""
    twin = type("BatchSampler", (BatchSampler,), {"__module__": "torchdata.stateful_dataloader.sampler"})
    loaders = ranks(lambda: DataLoader(range(10), batch_sampler=twin(range(10), 2, False)), 2)
    assert loaders[0].total_batch_size == 4
    subclass = type("BatchSampler", (BatchSampler,), {})
    assert ranks(lambda: DataLoader(range(10), batch_sampler=subclass(range(10), 2, False)))[0].total_batch_size is None
    assert run(loaders) == list(range(10))
