"""What a script draws between its calls, and what a dataset draws as a function of the sample."""

from __future__ import annotations

import random

import numpy as np
import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split


def train(accelerator, model, data, rate=0.3, loss_of=F.cross_entropy):
    """One pass over a loader; the prepared model and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return model, losses


@script()
def second_model_after_the_first(accelerator):
    """A second model takes its weights from where the first one's training has left the random state."""
    first, losses = train(accelerator, build(), loader())
    second, more = train(accelerator, Net(), loader())
    return result(accelerator, losses + more, first=first, second=second)


@script()
def split_after_training(accelerator):
    """``random_split`` without a generator chooses the samples of a second phase."""
    model, losses = train(accelerator, build(), loader())
    data = TensorDataset(*points(6 * BATCH, seed=4))
    kept, _ = random_split(data, [4 * BATCH, 2 * BATCH])
    second, more = train(accelerator, build(), DataLoader(kept, batch_size=BATCH))
    return result(accelerator, losses + more, first=model, second=second)


@script()
def folds_from_numpy(accelerator):
    """Cross-validation: each fold is drawn from numpy's global state after the fold before was trained."""
    np.random.seed(5)
    data, losses, models = TensorDataset(*points(6 * BATCH)), [], {}
    for fold in range(3):
        order = np.random.permutation(len(data))
        part = DataLoader(Subset(data, order[: 4 * BATCH].tolist()), batch_size=BATCH)
        models[f"fold{fold}"], more = train(accelerator, build(seed=fold), part)
        losses += more
    return result(accelerator, losses, **models)


@script()
def rate_drawn_for_each_phase(accelerator):
    """A random search: Python's ``random`` draws the learning rate of each run between them."""
    random.seed(3)
    losses, models = [], {}
    for run in range(3):
        models[f"run{run}"], more = train(accelerator, build(seed=run), loader(), rate=random.uniform(0.05, 0.5))
        losses += more
    return result(accelerator, losses, **models)


@script()
def weight_of_a_loss_drawn_in_the_loop(accelerator):
    """Each step weighs its loss by a number that torch draws in the loop."""
    return _weighed(accelerator, lambda: 0.5 + torch.rand(()).item())


@script()
def beta_share_from_numpy(accelerator):
    """Each step weighs its loss by ``np.random.beta``, as mixup does."""
    np.random.seed(6)
    return _weighed(accelerator, lambda: float(np.random.beta(0.4, 0.4)))


def _weighed(accelerator, draw):
    model = build()
    model, losses = train(accelerator, model, loader(), loss_of=lambda output, y: draw() * F.cross_entropy(output, y))
    return result(accelerator, losses, model=model)


class Skipping(nn.Module):
    """Residual layers of which ``random`` leaves some out; ``(B, F) -> (B, C)``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            share = random.random()
            x = x + share * torch.tanh(layer(x))
        return self.head(x)


@script()
def depth_by_random(accelerator):
    """Stochastic depth whose shares Python's ``random`` draws in the forward."""
    random.seed(4)
    model, losses = train(accelerator, build(Skipping), loader())
    return result(accelerator, losses, model=model)


class ByIndex(Dataset):
    """Noise that is a function of the sample's index, from generators that are made for each read."""

    def __init__(self, samples=4 * BATCH, kind="numpy"):
        self.x, self.y = points(samples)
        self.kind = kind

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.kind == "numpy":
            drawn = torch.from_numpy(np.random.default_rng(index).normal(size=FEATURES)).float()
        else:
            drawn = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return self.x[index] + 0.5 * drawn, self.y[index]


@script()
def augmentation_by_index(accelerator):
    """Each sample's noise comes from ``np.random.default_rng(index)``."""
    model, losses = train(accelerator, build(), DataLoader(ByIndex(), batch_size=BATCH))
    return result(accelerator, losses, model=model)


@script()
def augmentation_by_index_in_workers(accelerator):
    """The same from torch generators, in two workers."""
    data = DataLoader(ByIndex(kind="torch"), batch_size=BATCH, num_workers=2, multiprocessing_context="fork")
    model, losses = train(accelerator, build(), data)
    return result(accelerator, losses, model=model)


class SeedsGlobals(ByIndex):
    """Seeds the global generators by the index before it draws, as some augmentation libraries do."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        drawn = torch.randn(FEATURES) + float(np.random.rand()) + random.random()
        return self.x[index] + 0.5 * drawn, self.y[index]


@script()
def augmentation_seeds_globals(accelerator):
    """A dataset seeds the global generators by the index and draws from them, in a worker."""
    data = DataLoader(SeedsGlobals(), batch_size=BATCH, num_workers=1, multiprocessing_context="fork")
    model, losses = train(accelerator, build(), data)
    return result(accelerator, losses, model=model)


@script()
def shuffle_by_a_generator_after_training(accelerator):
    """A loader with ``shuffle=True`` and a seeded generator, prepared after another model was trained."""
    first, losses = train(accelerator, build(), loader())
    data = DataLoader(
        TensorDataset(*points(seed=8)), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(9)
    )
    second, more = train(accelerator, Net(), data)
    return result(accelerator, losses + more, first=first, second=second)
