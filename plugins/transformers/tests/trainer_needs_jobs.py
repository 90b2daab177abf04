"""What the ranks of ``test_trainer_needs.py`` run: loops without Transformers, of what its Trainer asks for."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import trainer_jobs as jobs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, load_checkpoint_in_model, load_config

ROWS = 18


def begun(config: dict[str, Any]) -> Accelerator:
    if "RANK" in os.environ:  # the process of a rank, which ends with the job
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
    return Accelerator(config=load_config(overrides={"use_cpu": True, **config}, environ={}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def data(rows: int = ROWS, size: int = 6) -> Any:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(
        torch.randn(rows, 6, generator=generator), torch.randint(4, (rows,), generator=generator)
    )  # fmt: skip
    return DataLoader(samples, batch_size=size)


def trained(run: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> list[float]:
    """Losses of one pass."""
    losses = []
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        run.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return losses


def evaluated(run: Accelerator, model: Any, loader: Any) -> float:
    model.eval()
    with torch.no_grad():
        found = [run.gather_for_metrics(F.cross_entropy(model(x), y, reduction="none")) for x, y in loader]
    model.train()
    return float(torch.cat(found).mean())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """With decay and without, as scripts make them; the second is empty, as it is for an adapter."""
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def plain(*, decayed: bool = False) -> list[float]:
    """One process without Drivetrain, two passes."""
    model, losses = net(), []
    optimizer = two_groups(model) if decayed else torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step if decayed else 1.0)
    for _ in range(2):
        for inputs, labels in data():
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def empty_group(config: dict[str, Any], dp: int) -> tuple[list[float], list[int]]:
    run, model = begun(config), net()
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, data(size=6 // dp))
    losses = [one for _ in range(2) for one in trained(run, model, optimizer, loader, scheduler)]
    found = losses, [len(optimizer.param_groups), len(scheduler.get_last_lr())]
    run.end_training()
    return found


def evaluated_then_trained(config: dict[str, Any], dp: int, *, late: bool = False) -> list[float]:
    """A model that is prepared for evaluation first and then with its optimizer, or its optimizer alone."""
    run = begun(config)
    loader = run.prepare(data(size=6 // dp))
    model = run.prepare_model(net(), evaluation_mode=True)
    evaluated(run, model, run.prepare(data(13, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = run.prepare_optimizer(optimizer) if late else run.prepare(model, optimizer)[1]
    losses = [one for _ in range(2) for one in trained(run, model, optimizer, loader)]
    run.end_training()
    return losses


def freed_then_trained(config: dict[str, Any], dp: int) -> list[float]:
    """As Trainer does it: prepared for evaluation, freed, prepared with its optimizer."""
    run = begun(config)
    model = run.prepare_model(net(), evaluation_mode=True)
    evaluated(run, model, run.prepare(data(13, 3)))
    run.free_memory()
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data(size=6 // dp))
    losses = [one for _ in range(2) for one in trained(run, model, optimizer, loader)]
    run.end_training()
    return losses


def loaders_of_each_epoch(config: dict[str, Any], dp: int, folder: str) -> list[float]:
    """A run that prepares a loader for each evaluation, goes back to its first checkpoint, and is resumed."""
    run, model = begun(config), net()
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data(size=6 // dp))
    for epoch in range(2):
        losses = trained(run, model, optimizer, loader)
        evaluated(run, model, run.prepare(data(13, 3)))
        run.save_state(f"{folder}/{epoch}")
    evaluated(run, model, run.prepare(data(13, 3)))
    run.load_state(f"{folder}/0")
    again = trained(run, model, optimizer, loader)
    run.end_training()
    run, model = begun(config), net()
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data(size=6 // dp))
    run.load_state(f"{folder}/0")
    resumed = trained(run, model, optimizer, loader)
    run.end_training()
    return [abs(one - other) for found in (again, resumed) for one, other in zip(losses, found, strict=True)]


def weights_loaded(config: dict[str, Any], dp: int, folder: str, *, tied: bool = False) -> tuple[float, float]:
    """How far weights are from those that ``save_model`` wrote: after further training, and after they are loaded."""
    run, model = begun(config), net()
    if tied:
        model = nn.Sequential(model, nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[1].weight
    model, optimizer, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data(size=6 // dp))
    trained(run, model, optimizer, loader)
    run.save_model(model, folder, max_shard_size=150)
    run.wait_for_everyone()
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def distance() -> float:
        return max(float((value - saved[name]).abs().max()) for name, value in model.state_dict().items())

    trained(run, model, optimizer, loader)
    before = distance()
    load_checkpoint_in_model(model, folder, strict=True)
    found = before, distance()
    run.end_training()
    return found


def t5_generates(config: dict[str, Any]) -> Any:
    """What T5 says after it is prepared; without a configuration, before."""
    model = jobs.t5()
    run = None
    if config:
        jobs.quiet()
        run = begun(config)
        model = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    words = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        said = model.eval().generate(input_ids=words, max_new_tokens=5, do_sample=False, no_repeat_ngram_size=1)
    if run is not None:
        run.end_training()
    return said


def of_peft(config: dict[str, Any], *, adapter: bool) -> list[str]:
    """Names of parameters that are cut over ranks, of a Llama or of the same one with an adapter, by its names."""
    jobs.quiet()
    run = begun(config)
    model = run.prepare(jobs.lora() if adapter else jobs.llama())
    cut = [name for name, one in model.named_parameters() if hasattr(one, "full_tensor") and "lora" not in name]
    run.end_training()
    return sorted(name.removeprefix("base_model.model.").replace(".base_layer", "") for name in cut)
