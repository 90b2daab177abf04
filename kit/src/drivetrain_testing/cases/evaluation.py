"""Checks evaluation: outputs are the plain model's, and each sample counts once, in order."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.errors import UnsupportedError
from drivetrain_testing import diagnosis, models
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import assert_same_state, backward, full_state, share


def _numbers(num_samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size)


@case(guards="transformers#39961, transformers#48841")
def before_and_after_training(kit: Kit) -> None:
    """A prepared model evaluates before its first step and after it, without touching gradients or parameters."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = models.build("dense")
    x, y = models.dense_data(6)
    x, y = x.to(accelerator.device), y.to(accelerator.device)
    for _ in range(2):
        model.eval()
        before = full_state(accelerator, model)
        with torch.no_grad():
            plain.load_state_dict(before)
            torch.testing.assert_close(model(x).cpu(), plain(x.cpu()), rtol=0, atol=max(kit.atol, 1e-6))
        assert_same_state(full_state(accelerator, model), before, 0.0)
        model.train()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        after = full_state(accelerator, model)
        assert any(not torch.equal(after[name], before[name]) for name in after), "the step was not applied"


@case()
def model_without_optimizer(kit: Kit) -> None:
    """A model may be prepared for evaluation only."""
    accelerator = kit.accelerator()
    model = accelerator.prepare_model(models.build("dense"), evaluation_mode=True).eval()
    x, _ = models.dense_data(6)
    with torch.no_grad():
        output = model(x.to(accelerator.device)).cpu()
    torch.testing.assert_close(output, models.build("dense")(x), rtol=0, atol=max(kit.atol, 1e-6))


@case(guards="accelerate#2007, accelerate#952, trl#7010")
def each_sample_once_in_order(kit: Kit) -> None:
    """However the samples divide over batches and ranks."""
    accelerator = kit.accelerator()
    for num_samples, batch_size in ((13, 2), (12, 3), (7, 4), (1, 2), (5, 1)):
        loader: Any = accelerator.prepare(_numbers(num_samples, batch_size))
        for _ in range(2):
            found = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
            numbers = torch.cat(found).tolist()
            first = found[0].tolist()
            permuted = "; the order of ranks is wrong" if first != sorted(first) == list(range(len(first))) else ""
            wrong = f"{num_samples} samples in batches of {batch_size} came back as {numbers}{permuted}"
            assert numbers == list(range(num_samples)), wrong


@case(guards="accelerate#2007")
def metrics_on_structures(kit: Kit) -> None:
    """Dicts, tuples and objects are cut alike."""
    accelerator = kit.accelerator()
    loader: Any = accelerator.prepare(_numbers(13, 2))
    tensors, words = [], []
    for (batch,) in loader:
        found = accelerator.gather_for_metrics({"ids": batch, "pair": (batch, batch.float().unsqueeze(1))})
        tensors.append(found["pair"][1])
        words += accelerator.gather_for_metrics(
            [f"sample {number}" for number in batch.tolist()], use_gather_object=True
        )
        assert len(found["ids"]) == len(found["pair"][0])
    assert torch.cat(tensors).flatten().tolist() == [float(number) for number in range(13)]
    assert words == [f"sample {number}" for number in range(13)]


@case(guards="accelerate#1234")
def metrics_after_skip_and_break(kit: Kit) -> None:
    """A loader entered late returns the rest exactly; after a ``break`` an unrelated gather is not cut."""
    accelerator = kit.accelerator()
    size = accelerator.backend.topology.dp_size
    loader: Any = accelerator.prepare(_numbers(13, 2))
    late = accelerator.skip_first_batches(loader, 1)
    found = torch.cat([accelerator.gather_for_metrics(batch[0]) for batch in late]).tolist()
    assert found == list(range(2 * size, 13)), f"after a skip: {found}"
    for number, _ in enumerate(loader):
        if number == len(loader) - 1:
            break
    rows = torch.zeros(10, device=accelerator.device)
    assert len(accelerator.gather_for_metrics(rows)) == 10 * size, "a gather outside of the loop was cut"


@case()
def statistics_are_alike(kit: Kit) -> None:
    """Running statistics follow each rank's own batches while training; evaluation uses the same ones on every rank.

    A backend may refuse batch norms, before anything is trained.
    """
    accelerator = kit.accelerator()
    built: Any = models.build("batch_normed")
    optimizer: Any = SGD(built.parameters(), lr=0.1)
    x, y = models.dense_data(24)
    try:
        model, optimizer = accelerator.prepare(built, optimizer)
        for _ in range(2):
            mine, labels = share(accelerator, x, y)
            accelerator.backward(F.cross_entropy(model(mine), labels))
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError:
        return
    model.eval()
    with torch.no_grad():
        output = model(x.to(accelerator.device)).cpu()
    for rank, other in enumerate(accelerator.backend.gather_object(output)):
        apart = float((other - output).abs().max())
        assert apart <= 1e-6, f"rank {rank} evaluates with other statistics than this one: {apart:.1e} apart"


@case(world_sizes=(2,), applies=lambda capabilities: capabilities.multi_process)
def synchronised_statistics(kit: Kit) -> None:
    """``sync_batch_norm: true``: batch norms take the statistics of the global batch, or are refused."""
    x, y = models.dense_data(24)
    plain: Any = models.build("batch_normed")
    steps = SGD(plain.parameters(), lr=0.1)
    accelerator = kit.accelerator(sync_batch_norm=True)
    built: Any = models.build("batch_normed")
    try:
        model, optimizer = accelerator.prepare(built, SGD(built.parameters(), lr=0.1))
        for _ in range(2):
            mine, labels = share(accelerator, x, y)
            accelerator.backward(F.cross_entropy(model(mine), labels))
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError:
        return
    for _ in range(2):
        backward(F.cross_entropy(plain(x), y))
        steps.step()
        steps.zero_grad()
    with diagnosis.meaning("sync_batch_norm: batch norms do not take the statistics of the global batch"):
        assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), max(kit.atol, 2e-5))


class Centred(nn.Module):
    """Forward follows the mean of its batch in a buffer, which nothing but evaluation reads."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(models.FEATURES, 8), nn.Linear(8, models.CLASSES)
        self.register_buffer("mean", torch.zeros(models.FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        output: Tensor = self.head(torch.tanh(self.body(x)))
        return output


@case(world_sizes=(2,), applies=lambda capabilities: capabilities.multi_process)
def buffers_of_a_batch(kit: Kit) -> None:
    """A buffer that forward computes from its rank's samples is that of one process, or a warning names it."""
    x, y = models.dense_data(24)
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    accelerator = kit.accelerator()
    with models.seeded(3):
        plain = Centred()
    with models.seeded(3):
        built: Any = Centred()
    logging.getLogger("drivetrain").addHandler(listener)
    try:
        model, optimizer = accelerator.prepare(built, SGD(built.parameters(), lr=0.1))
        for _ in range(2):
            mine, labels = share(accelerator, x, y)
            accelerator.backward(F.cross_entropy(model(mine), labels))
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError:
        return
    finally:
        logging.getLogger("drivetrain").removeHandler(listener)
    for _ in range(2):
        plain(x)
    found, everything = full_state(accelerator, model)["mean"], accelerator.backend.gather_object(" ".join(said))
    apart = float((found - plain.mean).abs().max())
    told = any("buffers" in each and "mean" in each for each in everything)
    assert told or apart <= max(kit.atol, 2e-5), f"a buffer of a batch is {apart:.1e} off, without a word"


@case()
def training_mode_is_the_users(kit: Kit) -> None:
    """``train()`` and ``eval()`` reach the user's modules and nothing else switches them."""
    accelerator = kit.accelerator()
    module = models.build("normed")
    model: Any
    model, _ = accelerator.prepare(module, SGD(module.parameters(), lr=0.1))
    assert model.training
    assert not model.eval().training
    assert all(not part.training for part in accelerator.unwrap_model(model).modules())
    model.train()
    assert all(part.training for part in accelerator.unwrap_model(model).modules())
