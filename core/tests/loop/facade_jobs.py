"""What the ranks of the facade tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DistributedType
from drivetrain.errors import UsageError


class Configured(nn.Module):
    """A model with an attribute, a buffer and a method of its own, as users have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"hidden": 4}
        self.layer = nn.Linear(3, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x) * self.scale}

    def describe(self) -> str:
        return f"hidden {self.config['hidden']}"


def shape_of_prepare() -> dict[str, Any]:
    accelerator = Accelerator()
    model, optimizer_source = Configured(), None
    optimizer_source = torch.optim.SGD(model.parameters(), lr=0.1)
    marker = object()
    scheduler_source = torch.optim.lr_scheduler.StepLR(optimizer_source, 1)
    loader_source = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    scheduler, other, model_, loader, optimizer = accelerator.prepare(
        scheduler_source, marker, model, loader_source, optimizer_source
    )
    found = {
        "unknown passes": other is marker,
        "one is one": accelerator.prepare(model_) is model_ and accelerator.prepare(marker) is marker,
        "names": sorted(model_.state_dict()),
        "parameters": [name for name, _ in model_.named_parameters()],
        "attribute": model_.config["hidden"],
        "method": model_.describe(),
        "is module": isinstance(model_, nn.Module),
        "is optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "unwrapped": accelerator.unwrap_model(model_) is model,
        "scheduler follows": scheduler.optimizers == [optimizer],
        "loader length": len(loader),
        "type": accelerator.distributed_type == (DistributedType.NO if accelerator.num_processes == 1 else "ddp"),
        "state": accelerator.state.num_processes,
        "submodule": model_.layer is model.layer,
        "children": [name for name, _ in model_.named_children()],
    }
    model_.eval()
    found["eval reaches"] = not model.training and not model.layer.training
    accelerator.end_training()
    return found


def optimizer_later(order: str) -> float:
    """Model and optimizer prepared in two calls, in either order."""
    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    result = model.weight.sum().item()
    accelerator.end_training()
    return result


def scheduler_moves(per_process: bool, steps: int) -> list[float]:
    accelerator = Accelerator(step_scheduler_per_process=per_process)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    accelerator.end_training()
    return rates


def plateau(epochs: int) -> float:
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(epochs):
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum() * 0.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(1.0)
    rate = optimizer.param_groups[0]["lr"]
    accelerator.end_training()
    return rate


def explicit_step(ragged: bool) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Three ``train_step`` windows of two micro-batches."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = explicit_data(ragged)
    rank, size = accelerator.process_index, accelerator.num_processes
    losses, norms = [], []
    for step in range(3):
        part_x, part_y = x[step * 8 : step * 8 + 8], y[step * 8 : step * 8 + 8]
        mine = [(part_x[half][rank::size], part_y[half][rank::size]) for half in (slice(0, 4), slice(4, 8))]
        reduction = "sum" if ragged else "mean"
        output = accelerator.train_step(
            model,
            mine,
            lambda out, batch, reduction=reduction: F.cross_entropy(out, batch[1], reduction=reduction),
            num_items=(lambda batch: (batch[1] != -100).sum()) if ragged else None,
            max_norm=0.3,
        )
        losses.append(output.loss.item())
        norms.append(output.grad_norm.item())
    result = losses, norms, [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.end_training()
    return result


def explicit_data(ragged: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    if ragged:
        y[torch.rand(24, generator=generator) < 0.4] = -100
        y[0:4] = -100
    return x, y


def triggers() -> list[bool]:
    accelerator = Accelerator()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    seen = [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.end_training()
    return seen


def uneven(folder: str) -> tuple[list[torch.Tensor], int, int]:
    """Five samples on two ranks, joined: rank 0 has a batch more. Then a save, to which both come."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(10.0).view(5, 2)), batch_size=1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (x,) in data:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    result = [parameter.detach().clone() for parameter in model.parameters()], seen
    step = accelerator.step
    accelerator.save_state(folder)
    accelerator.end_training()
    return *result, step


def hooked_save(folder: str) -> tuple[list[str], float, bool]:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0)
    model = accelerator.prepare(model)

    def keep(models: list[Any], weights: list[Any], path: str) -> None:
        if accelerator.is_main_process:
            torch.save(weights[0]["weight"], f"{path}/mine.pt")
        weights.pop()

    handle = accelerator.register_save_state_pre_hook(keep)
    accelerator.save_state(folder)
    nn.init.constant_(model.module.weight, 5.0)
    handle.remove()

    def take(models: list[Any], path: str) -> None:
        models.pop().module.weight.data.copy_(torch.load(f"{path}/mine.pt", weights_only=True))

    accelerator.register_load_state_pre_hook(take)
    accelerator.load_state(folder)
    files = sorted(path.name for path in Path(folder).iterdir())
    result = files, model.weight.mean().item(), not accelerator.check_trigger()
    accelerator.end_training()
    return result


def numbered(folder: str) -> list[Any]:
    from drivetrain import ProjectConfiguration

    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    model = accelerator.prepare(nn.Linear(2, 2))
    made = [accelerator.save_state() for _ in range(3)]
    nn.init.zeros_(model.module.weight)
    loaded = accelerator.load_state()
    accelerator.end_training()
    again = Accelerator(
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    )
    again.prepare(nn.Linear(2, 2))
    again.load_state()
    next_one = again.save_state()
    latest = again.load_state()
    again.end_training()
    return [path.rsplit("/", 1)[1] for path in (*made, loaded, next_one, latest)]


def known_denominator(length: int) -> torch.Tensor:
    """Ragged sums over the parts of twelve rows, divided by the number of labels that count; the weights afterwards."""
    accelerator = Accelerator(gradient_accumulation_steps=length)
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, -100, 3, -100, 1, 2, -100, -100, -100, 3, 0])
    mine = torch.arange(12).chunk(accelerator.num_processes)[accelerator.process_index]
    for rows in mine.chunk(length):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum")
            accelerator.backward(loss, denominator=7)
            optimizer.step()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()
    accelerator.end_training()
    return weights


def lazy_layers(initialised: bool) -> str:
    """What ``prepare`` says of a model with lazy layers."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))
    if initialised:
        with torch.no_grad():
            model(torch.ones(2, 3))
    said = ""
    try:
        accelerator.prepare(model)
    except UsageError as error:
        said = str(error)
    accelerator.end_training()
    return said
