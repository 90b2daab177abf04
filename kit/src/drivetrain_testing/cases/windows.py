"""Checks accumulation windows: k micro-batches equal one batch, and the last window may be short."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain_testing import models
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario, adamw, assert_same_state, backward, full_state, share


@case(guards="accelerate#3877, accelerate#1970")
def full_windows(kit: Kit) -> None:
    """Two micro-batches make the step of one batch of both."""
    compare(kit, Scenario(window=2))


@case(guards="accelerate#1847")
def partial_window(kit: Kit) -> None:
    """An epoch's last window is divided by the micro-batches that it has; the next epoch starts a new window."""
    compare(kit, Scenario(micro_steps=5, window=4, epochs=2))


@case()
def ragged_windows(kit: Kit) -> None:
    """Ragged labels over windows, the last of them short: one denominator per window, over all ranks."""
    compare(kit, Scenario("words", ragged=True, by_items=True, global_batch=4, micro_steps=5, window=3))


@case()
def adaptive_windows(kit: Kit) -> None:
    """An optimizer with state sees one gradient per window."""
    compare(kit, Scenario(micro_steps=6, window=3, epochs=2, optimizer=adamw, max_norm=1.0))


@case(guards="accelerate#1847")
def several_micro_steps_on_one_batch(kit: Kit) -> None:
    """Micro-steps on parts of each batch: the last batch forces no extra optimizer steps."""
    accelerator = kit.accelerator(gradient_accumulation_steps=2)
    scenario = Scenario(global_batch=16, micro_steps=3)
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    loader: Any = scenario.loader(accelerator.backend.topology.dp_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for x, y in loader:
        for part in range(2):
            with accelerator.accumulate(model):
                rows = slice(part * len(x) // 2, (part + 1) * len(x) // 2)
                accelerator.backward(F.cross_entropy(model(x[rows]), y[rows]))
                steps += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
    assert steps == 3, f"{steps} optimizer steps for 3 batches of 2 micro-steps and windows of 2"
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    features, labels = scenario.tensors()
    for first in range(0, 48, 16):
        step.zero_grad()
        backward(F.cross_entropy(plain(features[first : first + 16]), labels[first : first + 16]))
        step.step()
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case()
def without_accumulate(kit: Kit) -> None:
    """Without ``accumulate`` the script's step ends a window; each loss is divided as in a full one."""
    accelerator = kit.accelerator(gradient_accumulation_steps=4)
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    x, y = models.dense_data(12)
    for _ in range(2):
        step.zero_grad()
        backward(F.cross_entropy(plain(x), y) / 4)
        step.step()
        optimizer.zero_grad()
        mine, labels = share(accelerator, x, y)
        accelerator.backward(F.cross_entropy(model(mine), labels))
        optimizer.step()
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case()
def steps_inside_a_window_wait(kit: Kit) -> None:
    """Inside a window ``step`` and ``zero_grad`` change neither parameters nor gradients."""
    accelerator = kit.accelerator(gradient_accumulation_steps=3)
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = full_state(accelerator, model)
    x, y = models.dense_data(6)
    for expected in (False, False, True):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)))
            assert accelerator.sync_gradients is expected
            optimizer.step()
            optimizer.zero_grad()
        moved = any(not torch.equal(tensor, before[name]) for name, tensor in full_state(accelerator, model).items())
        assert moved is expected, f"parameters {'moved' if moved else 'stayed'} with sync_gradients={expected}"
