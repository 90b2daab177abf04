"""Samplers of every kind: followed alike by every rank, which all are in one process here."""

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
        # The seed of workers is drawn elsewhere, so that the first rank's sampler draws the first number.
        return DataLoader(numbers(), batch_size=2, sampler=SAMPLERS[name](), generator=torch.Generator())

    def two_epochs(loaders):
        epochs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            epochs.append(run(loaders))
        return epochs

    epochs = two_epochs(ranks(build))
    assert len(epochs[0]) == len(SAMPLERS[name]())
    assert two_epochs(ranks(build, 4)) == epochs
    if name != "list":
        assert epochs[0] != epochs[1]


def test_a_samplers_set_epoch_is_called_where_the_script_calls_it(context, numbers):
    sampler = Backwards(N)
    loader = prepare_data_loader(DataLoader(numbers(), sampler=sampler), context())
    list(loader)
    list(loader)
    assert sampler.epochs == []
    loader.set_epoch(5)
    assert sampler.epochs == [5]


def test_a_sampler_draws_from_the_global_state_as_in_the_plain_loop(context, numbers):
    def after(prepare):
        torch.manual_seed(0)
        list(prepare(DataLoader(numbers(), sampler=Backwards(N), generator=torch.Generator())))
        return torch.get_rng_state().tolist()

    assert after(lambda loader: prepare_data_loader(loader, context())) == after(lambda loader: loader)


@pytest.mark.parametrize("says", [4, 9])
def test_a_wrong_length_is_said_once(context, numbers, says):
    class Wrong(Backwards):
        def __len__(self):
            return says

    def last_of(loader):
        return [loader.end_of_dataloader for _ in loader]

    loader = prepare_data_loader(DataLoader(numbers(), sampler=Wrong(6)), context())
    if says > 6:
        with pytest.warns(UserWarning, match=f"says that it has {says} samples, and ended elsewhere"):
            last_of(loader)
    assert last_of(loader) == [False] * 5 + [True]


def test_an_endless_sampler_is_read_as_far_as_needed(ranks, run, numbers):
    def build():
        return DataLoader(numbers(), batch_size=2, sampler=Endless(), generator=torch.Generator())

    torch.manual_seed(0)
    alone = run(ranks(build), 24)
    torch.manual_seed(0)
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
    sampler = DistributedSampler(numbers(), 2, 1, seed=3)
    with pytest.warns(UserWarning, match="DistributedSampler"):
        loaders = ranks(lambda: DataLoader(numbers(), sampler=sampler), 2)
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        # What torch's gives to a single replica, by its own seed and epoch.
        plain = DistributedSampler(numbers(), 1, 0, seed=3)
        plain.set_epoch(epoch)
        assert run(loaders) == list(plain)
    loaders[0].set_epoch(7)
    assert sampler.epoch == 7


def test_the_samplers_of_torchdata_are_known(ranks, run):
    """Its stateful loader brings twins of torch's classes; they are cut by samples too, not taken as batches."""
    twin = type("BatchSampler", (BatchSampler,), {"__module__": "torchdata.stateful_dataloader.sampler"})
    loaders = ranks(lambda: DataLoader(range(10), batch_sampler=twin(range(10), 2, False)), 2)
    assert loaders[0].total_batch_size == 4
    subclass = type("BatchSampler", (BatchSampler,), {})
    assert ranks(lambda: DataLoader(range(10), batch_sampler=subclass(range(10), 2, False)))[0].total_batch_size is None
    assert run(loaders) == list(range(10))
