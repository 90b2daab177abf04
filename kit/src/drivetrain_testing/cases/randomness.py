"""Checks which ranks draw the same random numbers: those that compute one batch together, and no others.

The script's own draws stay alike on every rank; forwards and reads of samples differ between data-parallel coordinates.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.rng import set_seed
from drivetrain.loop.model import prepared_model
from drivetrain_testing import models
from drivetrain_testing.kit import Kit, case

ROWS, STEPS = 4, 3


class Dropping(nn.Module):
    """Two layers with dropout between them; ``(B, F) -> (B, C)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, 16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.drop(torch.tanh(self.first(x))))
        return output


def _build(accelerator: Any) -> tuple[Any, Any, Tensor]:
    with models.seeded(3):
        model = Dropping()
    # Without a rate, so that losses of equal rows differ by their masks alone.
    prepared: tuple[Any, Any] = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
    return *prepared, torch.ones(ROWS, models.FEATURES, device=accelerator.device)


def _loss_of_step(accelerator: Any, model: Any, optimizer: Any, x: Tensor) -> float:
    loss = model(x).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _by_coordinate(accelerator: Any, mine: Any, what: str) -> dict[int, Any]:
    """Return the value of each data-parallel coordinate, which must be the same on all its ranks."""
    found: dict[int, Any] = {}
    topology = accelerator.backend.topology
    for coordinate, theirs in Ranks(accelerator.backend).gather((topology.dp_rank, mine)):
        first = found.setdefault(coordinate, theirs)
        assert first == theirs, f"ranks that compute one batch together draw other {what}: {first} and {theirs}"
    return found


def _script_draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def _assert_alike(accelerator: Any, drawn: Any, when: str) -> None:
    everyones = Ranks(accelerator.backend).gather(drawn)
    assert everyones.count(everyones[0]) == len(everyones), f"the script's numbers differ among ranks {when}"


@case(guards="pytorch#87984")
def masks_of_each_rank(kit: Kit) -> None:
    """After one ``set_seed`` each data-parallel coordinate draws other masks; the script's numbers stay alike."""
    accelerator = kit.accelerator()
    set_seed(7)
    model, optimizer, x = _build(accelerator)
    losses = []
    for _ in range(STEPS):
        losses.append(_loss_of_step(accelerator, model, optimizer, x))
        _assert_alike(accelerator, _script_draws(), "after a step")
    assert len(set(losses)) == STEPS, f"steps draw the same masks: {losses}"
    found = _by_coordinate(accelerator, losses, "masks")
    for step, each in enumerate(zip(*found.values(), strict=True)):
        assert len(set(each)) == len(each), f"data-parallel ranks draw the same masks in step {step + 1}: {each}"


@case()
def masks_of_an_explicit_step(kit: Kit) -> None:
    """So does ``train_step``."""
    accelerator = kit.accelerator()
    set_seed(7)
    model, _, x = _build(accelerator)
    trainable, losses, means = _trainable(model), list[float](), list[float]()
    step = trainable.forward_backward

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        # The loss of this rank's rows, before ranks are averaged.
        loss: Tensor = step(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainable.forward_backward = noted
    for _ in range(STEPS):
        means.append(float(accelerator.train_step(model, (x, x), lambda output, _: output.pow(2).mean()).loss))
        _assert_alike(accelerator, _script_draws(), "after a step")
    assert len(set(means)) == STEPS, f"steps draw the same masks: {means}"
    for each in zip(*_by_coordinate(accelerator, losses, "masks").values(), strict=True):
        assert len(set(each)) == len(each), f"data-parallel ranks draw the same masks: {each}"


def _trainable(model: Any) -> Any:
    prepared = prepared_model(model)
    assert prepared is not None, "prepare has just made it"
    return prepared.trainable


@case()
def masks_go_on_after_a_load(kit: Kit) -> None:
    """Masks after a load are those after the save, and the same run repeats them."""
    accelerator = kit.accelerator()
    set_seed(7)
    model, optimizer, x = _build(accelerator)
    begun = _loss_of_step(accelerator, model, optimizer, x)
    accelerator.save_state(str(kit.shared / "masks"))
    expected = [_loss_of_step(accelerator, model, optimizer, x) for _ in range(STEPS)]
    accelerator.load_state(str(kit.shared / "masks"))
    assert [_loss_of_step(accelerator, model, optimizer, x) for _ in range(STEPS)] == expected
    set_seed(7)
    assert _loss_of_step(accelerator, model, optimizer, x) == begun, "one seed gives other masks the second time"


@case()
def equal_masks_on_demand(kit: Kit) -> None:
    """``set_seed(seed, device_specific=False)``: every rank draws the same masks."""
    accelerator = kit.accelerator()
    model, optimizer, x = _build(accelerator)
    try:
        set_seed(7, device_specific=False)
        losses = [_loss_of_step(accelerator, model, optimizer, x) for _ in range(STEPS)]
        if not accelerator.backend.capabilities.pipelined:
            _assert_alike(accelerator, losses, "in forwards, against device_specific=False")
        _assert_alike(accelerator, _script_draws(), "after a step")
    finally:
        set_seed(7)


class Noisy(Dataset[Tensor]):
    """Draws from every generator that a dataset may use; ``() -> (6,)``: the index, and five numbers."""

    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(5), torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        held = float(self.numpy.random()), float(torch.rand((), generator=self.torch))
        return torch.tensor([index, *_script_draws(), *held])


def _read(kit: Kit, *, in_a_worker: bool) -> None:
    accelerator = kit.accelerator()
    set_seed(7)
    # As DataLoader starts its workers where nothing else is said, which a rank of a test may have changed.
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    data = DataLoader(Noisy(), batch_size=2, shuffle=True, **(how if in_a_worker else {}))
    loader: Any = accelerator.prepare_data_loader(data)
    mine = [row for _ in range(2) for batch in loader for row in batch.tolist()]
    found = _by_coordinate(accelerator, mine, "augmentations")
    if len(found) > 1:
        for kind, name in enumerate(("torch", "random", "numpy", "default_rng", "a torch.Generator"), 1):
            drawn = [row[kind] for rows in found.values() for row in rows]
            assert len(set(drawn)) == len(drawn), f"reads of {name}: {len(set(drawn))} different of {len(drawn)}"
    _assert_alike(accelerator, _script_draws(), "after the reads")


@case()
def reads_of_each_rank(kit: Kit) -> None:
    """A dataset that draws gives other numbers to each data-parallel coordinate, in each epoch."""
    _read(kit, in_a_worker=False)


@case()
def reads_of_workers(kit: Kit) -> None:
    """So it does in workers."""
    _read(kit, in_a_worker=True)
