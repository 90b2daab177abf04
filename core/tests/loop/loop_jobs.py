"""What the ranks of these tests run. Module-level functions, so that a forked rank finds them by name."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradientAccumulationPlugin
from drivetrain.loop.optimizer import before_step


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def loader(rows: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(rows)), batch_size=batch_size)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def micro_steps_per_batch(rows: int, batch_size: int, micro: int, steps: int) -> tuple[int, list[Tensor]]:
    """Several micro-steps on each batch; how many optimizer steps that makes, and the weights at the end."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = loader(rows, batch_size // accelerator.num_processes)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, y in data:
        for part in zip(x.chunk(micro), y.chunk(micro), strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(part[0]), part[1]))
                optimizer.step()
                optimizer.zero_grad()
    result = accelerator.step, values(model)
    accelerator.end_training()
    return result


def zero_grad_first(steps: int, batches: int) -> list[Tensor]:
    """The other common order of a loop: zero_grad at the top of each micro-batch."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(4 * batches, 4 // accelerator.num_processes))
    for x, y in data:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    result = values(model)
    accelerator.end_training()
    return result


def own_windows(batches: int, every: int) -> list[Tensor]:
    """Accumulation by hand with no_sync, the script dividing its own loss."""
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(4 * batches, 4 // accelerator.num_processes))
    for index, (x, y) in enumerate(data):
        if (index + 1) % every:
            with accelerator.no_sync(model):
                accelerator.backward(F.cross_entropy(model(x), y) / every)
        else:
            accelerator.backward(F.cross_entropy(model(x), y) / every)
            optimizer.step()
            optimizer.zero_grad()
    result = values(model)
    accelerator.end_training()
    return result


def two_players(steps: int, batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """A generator and a discriminator, each with a window of its own."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    first, second = make_model(0), nn.Linear(3, 2)
    nn.init.constant_(second.weight, 0.3)
    nn.init.constant_(second.bias, 0.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    first, second, *optimizers, data = accelerator.prepare(
        first, second, *optimizers, loader(4 * batches, 4 // accelerator.num_processes)
    )
    for x, y in data:
        with accelerator.accumulate(second):
            accelerator.backward(F.cross_entropy(second(first(x).detach()), (y > 0).long()))
            optimizers[1].step()
            optimizers[1].zero_grad()
        with accelerator.accumulate(first):
            accelerator.backward(F.cross_entropy(second(first(x)), (y > 1).long()))
            optimizers[0].step()
            optimizers[0].zero_grad()
        if accelerator.sync_gradients:
            optimizers[1].zero_grad()
    result = values(first), values(second)
    accelerator.end_training()
    return result


def two_losses_on_a_micro_batch(batches: int, steps: int) -> list[Tensor]:
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(4 * batches, 4 // accelerator.num_processes))
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.backward(0.1 * model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    result = values(model)
    accelerator.end_training()
    return result


def many_settings() -> dict[str, Any]:
    """Two accelerators with different settings in one process, and what each believes."""
    one = Accelerator(gradient_accumulation_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    first, second = one.prepare(make_model()), two.prepare(make_model())
    with one.accumulate(first):
        open_one = one.sync_gradients
    outputs = first(torch.zeros(1, 6)).dtype, second(torch.zeros(1, 6)).dtype
    facts = {
        "steps": (one.gradient_accumulation_steps, two.gradient_accumulation_steps),
        "precision": (one.mixed_precision, two.mixed_precision),
        "sync": (open_one, two.sync_gradients),
        "outputs": outputs,
        "world": (one.num_processes, two.num_processes),
    }
    two.end_training()
    facts["alive"] = one.reduce(torch.ones(1)).item()
    one.end_training()
    return facts


def non_finite(precision: str) -> tuple[list[Tensor], list[Tensor], int, bool, float]:
    """A step whose gradient is infinite on one rank only, with clipping."""
    accelerator = Accelerator(mixed_precision=precision)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = values(model)
    loss = model(torch.ones(2, 6)).float().pow(2).mean()
    accelerator.backward(loss * (float("inf") if accelerator.is_last_process else 1.0))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    result = before, values(model), scheduler.last_epoch, accelerator.optimizer_step_was_skipped, norm.item()
    accelerator.end_training()
    return result


def own_windows_of_items(batches: int, every: int) -> list[Tensor]:
    """As :func:`own_windows`, with sums and the number of items that count."""
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(4 * batches, 4 // accelerator.num_processes))
    for index, (x, y) in enumerate(data):
        counted = torch.where(y == 0, -100, y)
        last = (index + 1) % every == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), counted, reduction="sum")
            accelerator.backward(loss, num_items=(counted != -100).sum())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    result = values(model)
    accelerator.end_training()
    return result


def checks_of_steps_after(runs: int) -> int:
    """How often torch would call the check of unprepared steps, when these runs have ended one after the other."""
    for _ in range(runs):
        Accelerator(cpu=True).end_training()
        gc.collect()
    watching = _global_optimizer_pre_hooks.values()
    return sum(hook is before_step for hook in watching)
