"""Checks that a user's model trains, resumes and evaluates as in plain torch on one process.

These cases run only where a model is given; see :mod:`drivetrain_testing.user_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import backward, full_state
from drivetrain_testing.user_model import UserModel, build, check_deterministic

RATE, ROWS, MICRO_STEPS = 0.01, 2, 5
"""Learning rate, samples of a rank's micro-batch, micro-steps of the run (odd, so that a window of 2 ends short)."""

CLOSE = 1e-3
"""Part of the largest change of a parameter by which two runs may differ: sums over ranks are added in another order,
and a few steps magnify that; a wrong factor or a forgotten micro-batch changes a tenth or more."""


@dataclass
class Trained:
    """Result of a run: parameters before and after, the norm before clipping and the loss of each optimizer step."""

    before: dict[str, Tensor]
    after: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _parameters(user: UserModel) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in user.model.named_parameters()}


def _plain(kit: Kit, dp_size: int, window: int, max_norm: float) -> Trained:
    """The run in plain torch: the mean of the losses of all ranks' micro-batches of a window, one after the other."""
    user = build(kit.model)
    model, optimizer = user.model.train(), SGD(user.model.parameters(), lr=RATE)
    run = Trained(_parameters(user))
    for first in range(0, MICRO_STEPS, window):
        parts = range(first * dp_size, min(first + window, MICRO_STEPS) * dp_size)
        optimizer.zero_grad()
        losses = [user.loss(model, user.batch(part * ROWS, ROWS)) / len(parts) for part in parts]
        for loss in losses:
            backward(loss)
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        run.losses.append(sum(loss.item() for loss in losses))
        optimizer.step()
    run.after = _parameters(user)
    return run


def _loader(user: UserModel, dp_size: int) -> Any:
    return DataLoader(user.samples(ROWS * dp_size * MICRO_STEPS), batch_size=ROWS)


def _assert_same(actual: Trained, expected: Trained) -> None:
    """Norms, losses and parameters, each to :data:`CLOSE`; names as the user's module has them."""
    for what, mine, theirs in (
        ("norm before clipping", actual.norms, expected.norms),
        ("loss", actual.losses, expected.losses),
    ):
        assert len(mine) == len(theirs), f"{what}: {len(mine)} optimizer steps, not {len(theirs)}"
        for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            assert abs(here - there) <= CLOSE * abs(there) + 1e-6, f"{what} of step {number}: {here:g}, not {there:g}"
    assert_close(actual.after, expected)


def assert_close(after: dict[str, Tensor], expected: Trained) -> None:
    """Parameters after a run differ by no more than :data:`CLOSE` of the largest change, and by rounding."""
    missing = set(expected.after) - set(after)
    assert not missing, f"parameters are missing: {sorted(missing)}"
    moved = max(float((expected.after[name] - expected.before[name]).abs().max()) for name in expected.after)
    assert moved > 0, "the reference does not learn, so the comparison says nothing"
    for name, tensor in expected.after.items():
        allowed = CLOSE * moved + 4 * torch.finfo(torch.float32).eps * float(tensor.abs().max())
        found = float((after[name].to(tensor.dtype) - tensor).abs().max())
        assert found <= allowed, f"{name} differs by {found:.2e} where the largest change is {moved:.2e}"


@case()
def follows_plain_torch(kit: Kit) -> None:
    """One optimizer step for each batch: norms, losses and parameters are those of plain torch."""
    check_deterministic(kit.model)
    _train(kit, window=1, max_norm=1e9)


@case()
def windows_and_clipping(kit: Kit) -> None:
    """Two micro-batches to a step, the last window short, gradients clipped to half of what they are."""
    norm = _plain(kit, 1, 2, 1e9).norms[0]
    _train(kit, window=2, max_norm=norm / 2)


def _train(kit: Kit, window: int, max_norm: float) -> None:
    accelerator = kit.accelerator(gradient_accumulation_steps=window)
    dp_size = accelerator.backend.topology.dp_size
    user = build(kit.model)
    run = Trained({})
    model: Any
    model, optimizer, loader = accelerator.prepare(
        user.model, SGD(user.model.parameters(), lr=RATE), _loader(user, dp_size)
    )
    model.train()
    window_loss = torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = user.loss(model, batch)
            accelerator.backward(loss)
            window_loss = window_loss + loss.detach() / window
            if accelerator.sync_gradients:
                run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
                run.losses.append(accelerator.gather(window_loss).mean().item())
                window_loss = torch.zeros((), device=accelerator.device)
            optimizer.step()
            optimizer.zero_grad()
    run.after = full_state(accelerator, model)
    expected = _plain(kit, dp_size, window, max_norm)
    run.losses[-1] *= window / (MICRO_STEPS - window * (len(run.losses) - 1))  # the last window has fewer
    _assert_same(run, expected)


@case()
def explicit_step(kit: Kit) -> None:
    """``train_step`` with two micro-batches follows the same curve."""
    accelerator = kit.accelerator()
    dp_size = accelerator.backend.topology.dp_size
    user = build(kit.model)
    run = Trained({})
    model: Any
    model, _, loader = accelerator.prepare(
        user.model, SGD(user.model.parameters(), lr=RATE), _loader(user, dp_size)
    )
    model.train()
    batches = list(loader)
    for first in range(0, MICRO_STEPS, 2):
        result = accelerator.train_step(model, batches[first : first + 2], user.loss_fn, max_norm=1e9)
        assert result.grad_norm is not None, "train_step was given max_norm and returned no norm"
        run.norms.append(float(result.grad_norm))
        run.losses.append(float(result.loss))
    run.after = full_state(accelerator, model)
    _assert_same(run, _plain(kit, dp_size, 2, 1e9))


@case()
def resumes(kit: Kit) -> None:
    """Saved after two of five steps and loaded into a new run, AdamW ends where the uninterrupted run ends."""
    ends = []
    for phase in ("whole", "rest"):
        accelerator = kit.accelerator()
        user = build(kit.model)
        before = _parameters(user)
        optimizer: Any = AdamW(user.model.parameters(), lr=RATE)
        model: Any
        model, optimizer, loader = accelerator.prepare(
            user.model, optimizer, _loader(user, accelerator.backend.topology.dp_size)
        )
        model.train()
        if phase == "rest":
            accelerator.load_state(str(kit.shared / "cut"))
        steps = 0
        for batch in loader:
            accelerator.backward(user.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if phase == "whole" and steps == 2:
                accelerator.save_state(str(kit.shared / "cut"))
        assert steps == (MICRO_STEPS if phase == "whole" else MICRO_STEPS - 2), f"{steps} steps in the {phase} run"
        ends.append(Trained(before, full_state(accelerator, model)))
        kit.made.pop().end_training()
    assert_close(ends[1].after, Trained(ends[0].before, {name: ends[0].after[name] for name in ends[0].before}))


@case()
def evaluates(kit: Kit) -> None:
    """In evaluation the loss of every rank's batch is that of the plain model."""
    accelerator = kit.accelerator()
    topology = accelerator.backend.topology
    user, plain = build(kit.model), build(kit.model)
    model: Any
    model, _, loader = accelerator.prepare(
        user.model, SGD(user.model.parameters(), lr=RATE), _loader(user, topology.dp_size)
    )
    model.eval()
    with torch.no_grad():
        for step, batch in enumerate(loader):
            found = user.loss(model, batch).item()
            own = (step * topology.dp_size + topology.dp_rank) * ROWS
            expected = plain.loss(plain.model.eval(), plain.batch(own, ROWS)).item()
            assert abs(found - expected) <= CLOSE * max(1.0, abs(expected)), f"loss {found:g}, not {expected:g}"
