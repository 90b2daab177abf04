"""Checks the order of samples: a loader's sampler draws what it draws in a plain loop, and so does the next epoch's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from drivetrain.distributed.rng import set_seed
from drivetrain_testing import models
from drivetrain_testing.kit import Kit, case

SAMPLES, ROWS, EPOCHS = 26, 2, 3


class OfEverything(Sampler[int]):
    """Draws from the global states of numpy, ``random`` and torch, and from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(SAMPLES).tolist()
        random.shuffle(order)
        yield from (order[index] for index in torch.randperm(SAMPLES).tolist())
        self.rng.random()


def _data() -> TensorDataset:
    x = torch.randn(SAMPLES, models.FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(SAMPLES), x)


def _loaders(generator: torch.Generator) -> dict[str, DataLoader[Any]]:
    weights = (1 + torch.arange(SAMPLES) % 3).tolist()
    data = _data()
    return {
        "shuffle=True": DataLoader(data, ROWS, shuffle=True),
        "shuffle=True with a generator": DataLoader(data, ROWS, shuffle=True, generator=generator),
        "a WeightedRandomSampler": DataLoader(data, ROWS, sampler=WeightedRandomSampler(weights, 18)),
        "a sampler of the script's": DataLoader(data, ROWS, sampler=OfEverything()),
    }


def _states(generator: torch.Generator) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch's global generator": torch.get_rng_state().tolist(),
        "numpy's global generator": (numpy["state"]["key"].tolist(), numpy["state"]["pos"]),
        "random": random.getstate(),
        "the script's generator": generator.get_state().tolist(),
    }


def _epochs(
    loader: Any, generator: torch.Generator, shown: Callable[[Any], list[int]]
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The order of each epoch, and the states after it; the script seeds its generator in the last one."""
    orders, states = [], []
    for epoch in range(EPOCHS):
        if epoch == EPOCHS - 1:
            generator.manual_seed(9)
        orders.append([row for batch in loader for row in shown(batch)])
        states.append(_states(generator))
    return orders, states


@case()
def follows_the_plain_loader(kit: Kit) -> None:
    """Every epoch of a training has the plain loader's order, and leaves the generators where it leaves them."""
    accelerator = kit.accelerator()
    with models.seeded(3):
        model = torch.nn.Sequential(
            torch.nn.Linear(models.FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, models.CLASSES)
        )
    prepared: tuple[Any, Any] = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    model, optimizer = prepared

    def trained_on(batch: Any) -> list[int]:
        numbers, x = batch
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        gathered: list[int] = accelerator.gather_for_metrics(numbers).tolist()
        return gathered

    for name in _loaders(torch.Generator()):
        plain, own = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
        set_seed(7)
        expected, states = _epochs(_loaders(plain)[name], plain, lambda batch: batch[0].tolist())
        loader: Any = accelerator.prepare(_loaders(own)[name])
        set_seed(7)
        orders, after = _epochs(loader, own, trained_on)
        for epoch in range(EPOCHS):
            assert orders[epoch] == expected[epoch], f"{name}: epoch {epoch} is in another order than a plain loader's"
            moved = [whose for whose, state in states[epoch].items() if after[epoch][whose] != state]
            assert not moved, f"{name}: epoch {epoch} leaves {', '.join(moved)} in another state than a plain loop"


@case()
def goes_on_after_a_load(kit: Kit) -> None:
    """A state that was saved in the middle of an epoch goes on in its order, and so do the epochs after it."""
    accelerator = kit.accelerator()
    generator = torch.Generator().manual_seed(4)
    set_seed(7)
    loaders: list[Any] = [accelerator.prepare(loader) for loader in _loaders(generator).values()]
    saved = kit.shared / "order"
    for number, loader in enumerate(loaders):
        folder = str(saved / str(number))

        def shown(batch: Any) -> list[int]:
            gathered: list[int] = accelerator.gather_for_metrics(batch[0]).tolist()
            return gathered

        begun = iter(loader)
        shown(next(begun))
        accelerator.save_state(folder)
        expected = [row for batch in begun for row in shown(batch)], [row for batch in loader for row in shown(batch)]
        accelerator.load_state(folder)
        rest = [row for batch in loader for row in shown(batch)], [row for batch in loader for row in shown(batch)]
        name = list(_loaders(generator))[number]
        assert rest[0] == expected[0], f"{name}: the rest of the epoch is another one after a load"
        assert rest[1] == expected[1], f"{name}: the next epoch is another one after a load"
