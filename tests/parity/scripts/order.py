"""The order of samples: what the script's generators, seeds and samplers say, as in a plain loop."""

from __future__ import annotations

import random

import numpy as np
import torch
from parity_common import BATCH, build, mean, points, result, script
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

DATA = 5 * BATCH
"""Every batch divides by the ranks, so that the means of their losses are those of the batches."""


def dataset():
    return TensorDataset(*points(DATA, seed=6))


def train(accelerator, epochs, *loaders, before=lambda epoch: None, leave=None, seed=11):
    """Epochs over each loader in turn; every batch's loss follows from the batches before it."""
    model = build()
    torch.manual_seed(seed)
    model, optimizer, *loaders = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.4), *loaders)
    losses = []
    for epoch in range(epochs):
        before(epoch)
        for batches in loaders:
            for index, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                losses.append(mean(accelerator, loss))
                if index == leave:
                    break
    return result(accelerator, losses, model=model)


@script()
def shuffled_by_the_global_seed(accelerator):
    """``shuffle=True`` after ``torch.manual_seed``, and a loader for evaluation that is read in between."""
    return train(
        accelerator,
        3,
        DataLoader(dataset(), batch_size=BATCH, shuffle=True),
        DataLoader(TensorDataset(*points(2 * BATCH, seed=8)), batch_size=BATCH),
    )


@script()
def weighted_by_the_global_seed(accelerator):
    """``WeightedRandomSampler`` and ``SubsetRandomSampler`` without generators."""
    weights = (1 + torch.arange(DATA) % 5).double()
    return train(
        accelerator,
        2,
        DataLoader(dataset(), batch_size=BATCH, sampler=WeightedRandomSampler(weights, 3 * BATCH)),
        DataLoader(dataset(), batch_size=BATCH, sampler=SubsetRandomSampler(range(BATCH, 4 * BATCH))),
    )


@script()
def seeded_in_each_epoch(accelerator):
    """``generator.manual_seed(epoch)`` before each epoch."""
    generator = torch.Generator()
    batches = DataLoader(dataset(), batch_size=BATCH, shuffle=True, generator=generator)
    return train(accelerator, 3, batches, before=lambda epoch: generator.manual_seed(40 + epoch))


class OfNumpy(Sampler):
    """Whole batches, of which numpy chooses the order and ``random`` the samples."""

    def __len__(self):
        return 4

    def __iter__(self):
        order = np.random.permutation(DATA).tolist()
        return iter([random.sample(order, BATCH) for _ in range(4)])


@script()
def batches_drawn_by_numpy(accelerator):
    """A batch sampler that draws from ``np.random`` and ``random``, which the script draws from between epochs."""
    np.random.seed(5)
    random.seed(6)
    return train(
        accelerator,
        3,
        DataLoader(dataset(), batch_sampler=OfNumpy()),
        before=lambda epoch: (np.random.rand(epoch), random.random()),
    )


@script()
def generator_of_two_loaders(accelerator):
    """Two loaders share a generator, and each epoch leaves both early."""
    generator = torch.Generator().manual_seed(21)
    batches = [DataLoader(dataset(), batch_size=BATCH, shuffle=True, generator=generator) for _ in range(2)]
    return train(accelerator, 3, *batches, leave=2)


class Drawn(Sampler):
    """Draws each sample when it is asked for, from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(9)

    def __len__(self):
        return 3 * BATCH

    def __iter__(self):
        for _ in range(len(self)):
            yield int(self.rng.integers(DATA))


@script()
def sampler_with_a_generator_of_numpy(accelerator):
    """A sampler that holds ``np.random.default_rng`` and draws each index late; the script draws from it as well."""
    sampler = Drawn()
    return train(
        accelerator,
        2,
        DataLoader(dataset(), batch_size=BATCH, sampler=sampler),
        before=lambda epoch: sampler.rng.random(epoch + 1),
    )


class ShuffleBuffer(IterableDataset):
    """Samples by way of a buffer, of which one is drawn at a time."""

    def __iter__(self):
        drawn, held = random.Random(3), []
        for sample in dataset():
            held.append(sample)
            if len(held) == 8:
                yield held.pop(drawn.randrange(8))
        drawn.shuffle(held)
        yield from held


@script()
def stream_with_a_shuffle_buffer(accelerator):
    """A stream shuffles itself by a generator that it makes anew in each epoch."""
    return train(accelerator, 2, DataLoader(ShuffleBuffer(), batch_size=BATCH))


@script()
def curriculum(accelerator):
    """The data set shows more of its samples in each epoch, in a seeded order."""

    class Growing(TensorDataset):
        size = 2 * BATCH

        def __len__(self):
            return self.size

    data = Growing(*points(DATA, seed=6))

    def grow(epoch):
        data.size = (epoch + 2) * BATCH

    shuffled = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    return train(accelerator, 3, shuffled, before=grow)
