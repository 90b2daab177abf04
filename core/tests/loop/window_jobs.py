"""What the ranks of ``test_loop_weights`` run. Module-level functions, so that a forked rank finds them by name."""

from __future__ import annotations

import gc
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import UsageError


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def dataset(rows: int, seed: int = 1) -> TensorDataset:
    return TensorDataset(*make_data(rows, seed))


def mean_loss(rows: int, batch_size: int, steps: int, form: str, kind: str) -> tuple[int, list[Tensor]]:
    """An ordinary loop over data that does not divide, two epochs; optimizer steps and the weights at the end."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    loader: Any = DataLoader(dataset(rows), batch_size=batch_size)
    if kind == "sampler":
        loader = DataLoader(dataset(rows), batch_sampler=torch.arange(rows).split(batch_size))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            if form == "train_step":
                accelerator.train_step(model, (x, y), lambda out, batch: F.cross_entropy(out, batch[1]))
                continue
            with accelerator.accumulate(model) if form == "accumulate" else torch.enable_grad():
                if form == "sum":
                    accelerator.backward(F.cross_entropy(model(x), y, reduction="sum"), num_items=len(y))
                else:
                    accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    result = accelerator.step, values(model)
    accelerator.end_training()
    return result


def parts_of_an_uneven_batch() -> str:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset(15), batch_size=4))
    try:
        for x, y in loader:
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(part[0]), part[1]))
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def _rounds(form: str, first: Any, second: Any) -> Any:
    if form == "zip":
        yield from zip(first, second, strict=False)
    elif form == "cycle":
        yield from zip(first, cycle(second), strict=False)
    elif form == "endless":
        other = _endless(second)
        for one in first:
            yield one, next(other)
    elif form == "kept":
        other = iter(second)
        for one in first:
            try:
                two = next(other)
            except StopIteration:
                other = iter(second)
                two = next(other)
            yield one, two


def left_by_zip(sizes: tuple[int, int]) -> Any:
    """Return the batch still active after each of two loops over loaders that end apart, without a collector."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = make_model()
    first, second = (DataLoader(dataset(2 * size, seed), batch_size=2) for seed, size in enumerate(sizes))
    model, first, second = accelerator.prepare(model, first, second)
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            for (x, y), (other, _) in zip(first, second, strict=False):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y) + model(other).pow(2).mean())
            found.append(accelerator._active.batch_index())
        return found
    finally:
        gc.enable()
        accelerator.end_training()


def two_batches_of_one_loader() -> str:
    """Train on each batch and the one before it; the last has as many rows as that on rank 0, and fewer on rank 1."""
    accelerator = Accelerator()
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset(7), batch_size=2))
    try:
        for (x, y), (other, their) in pairwise(loader):
            accelerator.backward(F.cross_entropy(model(x), y) + F.cross_entropy(model(other), their))
            optimizer.step()
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


def two_loaders(form: str, sizes: tuple[int, int], steps: int, ends_loop: bool | None = None) -> Any:
    """One loop over two loaders of batches of 2 for each rank; steps, and the weights at the end."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    world = accelerator.num_processes
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = (DataLoader(dataset(2 * world * size, seed), batch_size=2) for seed, size in enumerate(sizes))
    model, optimizer, first, second = accelerator.prepare(model, optimizer, first, second)
    if ends_loop is not None:
        second.ends_loop = ends_loop
    try:
        for _ in range(2):
            for (x, y), (other, _) in _rounds(form, first, second):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y) + model(other).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        return accelerator.step, values(model)
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()


def nested_loops(steps: int) -> tuple[int, list[Tensor]]:
    """An inner loop over a loader within each batch of another: the inner one ends windows."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    world = accelerator.num_processes
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    outer, inner = (DataLoader(dataset(2 * world * size), batch_size=2) for size in (2, 5))
    model, optimizer, outer, inner = accelerator.prepare(model, optimizer, outer, inner)
    for _ in outer:
        for x, y in inner:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    result = accelerator.step, values(model)
    accelerator.end_training()
    return result


def uneven_pair() -> str:
    """Two loaders whose last batches the ranks share differently, in one loss."""
    accelerator = Accelerator()
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, first, second = accelerator.prepare(
        model, optimizer, DataLoader(dataset(7), batch_size=4), DataLoader(dataset(40), batch_size=4)
    )
    try:
        for (x, y), (other, _) in zip(first, second, strict=False):
            accelerator.backward(F.cross_entropy(model(x), y) + model(other).pow(2).mean())
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


# ---- labels ---------------------------------------------------------------------------------------------------------


def sentences(rows: int = 13) -> list[dict[str, Tensor]]:
    """Sentences with other numbers of labels that count, some with none."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(rows):
        words = torch.randint(1, 40, (9,), generator=generator)
        labels = words.clone()
        labels[int(torch.randint(2, 9, (), generator=generator)) :] = -100
        if index in (4, 5):
            labels[:] = -100
        made.append({"input_ids": words, "labels": labels})
    return made


class Speaker(nn.Module):
    """Predicts the next word, as a causal language model of Transformers: returns the mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids).cumsum(1)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def count_items(steps: int, factor: float = 1.0) -> list[Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=steps, count_items=True)
    model: Any = Speaker()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sentences(), batch_size=2))
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"] * factor)
                optimizer.step()
                optimizer.zero_grad()
    result = values(model)
    accelerator.end_training()
    return result


def summed(factor: bool, by_function: bool) -> Any:
    """One batch of 12 over all ranks, with a loss that is a sum; its gradients, or what was refused.

    Args:
        factor: it is multiplied by the number of processes.
        by_function: by ``train_step``, and a step of plain gradient descent with the learning rate 1.
    """
    accelerator = Accelerator()
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model, _optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(dataset(12), batch_size=12 // accelerator.num_processes),
    )

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        loss = F.cross_entropy(output, batch[1], reduction="sum")
        return loss * accelerator.num_processes if factor else loss

    try:
        for batch in loader:
            if by_function:
                accelerator.train_step(model, batch, loss_fn)
                return [one - parameter.detach() for one, parameter in zip(before, model.parameters(), strict=True)]
            accelerator.backward(loss_fn(model(batch[0]), batch))
        return [parameter.grad.clone() for parameter in model.parameters()]
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()


def sum_after_means(same: bool = False) -> str:
    """A second loss of the same model, which is a sum; ``same``: of the same loss function."""
    accelerator = Accelerator()
    model, loader = accelerator.prepare(make_model(), DataLoader(dataset(24), batch_size=4))
    try:
        for number, (x, y) in enumerate(loader):
            summed = F.cross_entropy(model(x), y, reduction="sum") if same else model(x).pow(2).sum()
            accelerator.backward(F.cross_entropy(model(x), y) if number == 0 else summed)
        return "nothing"
    except UsageError as error:
        return str(error)
    finally:
        accelerator.end_training()
