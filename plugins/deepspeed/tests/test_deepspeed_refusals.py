"""Shows the words of what DeepSpeed's backend refuses, and runs what they advise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, load_config
from drivetrain.utils import DummyScheduler
from drivetrain_testing import spawn

WORLD, STEPS = 2, 3


def accelerator(stage: int, **section: Any) -> Accelerator:
    overrides = {"distributed_type": "deepspeed", "use_cpu": True, "deepspeed.zero_stage": stage}
    overrides |= {f"deepspeed.{key}": value for key, value in section.items()}
    return Accelerator(config=load_config(overrides=overrides, environ={}))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def steps(run: Any, model: Any, optimizer: Any, first: int = 0) -> list[float]:
    """Losses over all ranks of :data:`STEPS` steps, each on its own batch."""
    losses = []
    for step in range(first, first + STEPS):
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        rows = slice(run.process_index, None, run.num_processes)
        loss = F.mse_loss(model(x[rows]), y[rows, :3])
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return losses


def alone() -> list[float]:
    """The same on one plain process, twice as many steps."""
    model, optimizer = build()
    losses = []
    for step in range(2 * STEPS):
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(x), y[:, :3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def said_by(call: Any, *args: Any, **kwargs: Any) -> str:
    """The error that a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def state_of_another_rank(folder: str) -> tuple[str, list[float]]:
    """Every rank loads what ``state_dict()`` returned on rank 0; then they save and load as advised."""
    run = accelerator(1)
    model, optimizer = run.prepare(*build())
    losses = steps(run, model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    states: list[Any] = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(states)
    words = said_by(optimizer.load_state_dict, states[0])
    run.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.load_state(folder)
    losses += steps(run, model, optimizer, STEPS)
    run.end_training()
    return words, losses


def test_a_state_dict_of_another_rank(tmp_path: Path) -> None:
    """Refuse the part of another rank where it is loaded; a checkpoint goes on with the numbers of one process."""
    expected = alone()
    for rank, (words, losses) in enumerate(spawn(state_of_another_rank, WORLD, str(tmp_path / "state"))):
        if rank:
            assert words.startswith("UnsupportedError: this state of AdamW is the part of rank 0 of 2")
            assert "Save with accelerator.save_state(folder) and load with accelerator.load_state(folder)." in words
        else:
            assert words == "nothing was refused"
        assert losses == pytest.approx(expected, abs=1e-6)


def prepared_again(stage: int) -> tuple[str, list[float]]:
    """A model is prepared, trained, freed and prepared again; then made anew and loaded, as advised."""
    run = accelerator(stage)
    model, optimizer = build()
    prepared, stepper = run.prepare(model, optimizer)
    steps(run, prepared, stepper)
    whole = run.get_state_dict(prepared)
    run.free_memory()
    words = said_by(run.prepare, model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3))
    again, optimizer = build()
    if run.is_main_process:
        again.load_state_dict(whole)
    losses = steps(run, *run.prepare(again, optimizer))
    run.end_training()
    return words, losses


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.gate("3")
def test_a_model_that_was_prepared_before(stage: int) -> None:
    """Refuse what DeepSpeed has taken apart; a new one with its state trains on as one process with new moments."""
    model, optimizer = build()
    for step in range(2 * STEPS):
        if step == STEPS:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
            expected = []
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step % STEPS))
        loss = F.mse_loss(model(x), y[:, :3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS:
            expected.append(float(loss.detach()))
    for words, losses in spawn(prepared_again, WORLD, stage):
        assert words.startswith("UnsupportedError: this Sequential was prepared before, and still has hooks")
        assert "construct it again, and on the main process load the state that accelerator.get_state_dict(" in words
        assert "every rank starts from its values" in words
        assert losses == pytest.approx(expected, abs=1e-6)


def quantised() -> tuple[str, list[float]]:
    """Weights of stage 3 are to be quantised on a CPU; then not, as advised."""
    words = said_by(accelerator, 3, config={"zero_optimization": {"stage": 3, "zero_quantized_weights": True}})
    run = accelerator(3, config={"zero_optimization": {"stage": 3, "zero_quantized_weights": False}})
    losses = steps(run, *run.prepare(*build()))
    run.end_training()
    return words, losses


def test_weights_that_a_cpu_does_not_quantise() -> None:
    """Refuse quantised weights where DeepSpeed would leave them whole; without them the numbers are one process's."""
    for words, losses in spawn(quantised, WORLD):
        assert "zero_quantized_weights" in words
        assert "needs an accelerator: DeepSpeed quantises nothing on a CPU. Remove it, or set it to false." in words
        assert losses == pytest.approx(alone()[:STEPS], abs=1e-6)


def scheduled(kind: str) -> Any:
    """Prepare a stand-in for the scheduler of the file; returns its rates."""
    run = accelerator(1, config={"scheduler": {"type": kind, "params": {"warmup_num_steps": 4}}})
    model, optimizer = build()
    model, optimizer, schedule = run.prepare(model, optimizer, DummyScheduler(optimizer))
    rates = []
    for _ in range(STEPS):
        steps(run, model, optimizer)
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    run.end_training()
    return rates


def unknown_schedule() -> tuple[str, list[float]]:
    return said_by(scheduled, "WarmupLRR"), scheduled("WarmupLR")


def test_a_scheduler_that_nobody_has() -> None:
    """Refuse a scheduler by an unknown name, with the names that there are; one of these moves the rate."""
    for words, rates in spawn(unknown_schedule, WORLD):
        assert words.startswith("UsageError: neither DeepSpeed nor torch has a scheduler 'WarmupLRR'")
        assert "Write one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest." in words
        assert rates == sorted(set(rates)), "it warms up"
