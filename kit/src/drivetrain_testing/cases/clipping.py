"""Checks gradient clipping: the norm is global, taken before clipping and equal on all ranks; overflows are skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from drivetrain_testing import diagnosis, models
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario, assert_same_state, backward, full_state, share


@case(guards="pytorch#88621")
def clips_as_one_process_does(kit: Kit) -> None:
    """Norm before clipping and the clipped step equal the single-process ones, also over windows and ragged labels."""
    compare(kit, Scenario(max_norm=0.1))
    compare(kit, Scenario("words", ragged=True, by_items=True, global_batch=4, window=3, max_norm=0.05))


@case()
def leaves_small_gradients(kit: Kit) -> None:
    """A norm below the limit changes nothing."""
    compare(kit, Scenario(max_norm=1e6))


@case(guards="pytorch#170862, torchtitan#766")
def same_norm_everywhere(kit: Kit) -> None:
    """Every rank gets one plain 0-d float tensor with the same value, which is no DTensor, though its data differ."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = models.dense_data(6, seed=50 + accelerator.backend.topology.dp_rank)
    accelerator.backward(F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    assert type(norm) is torch.Tensor, f"the norm is a {type(norm).__name__}"
    assert norm.shape == (), f"the norm has the shape {tuple(norm.shape)}"
    assert norm.is_floating_point()
    values = accelerator.gather(norm).tolist()
    assert len(set(values)) == 1, f"ranks see different norms: {values}"
    assert values[0] > 0.01, f"clip_grad_norm_ returned the norm after clipping, {values[0]:.3g}, not the one before"


@case()
def not_finite_is_skipped(kit: Kit) -> None:
    """One rank's gradient is not finite: all ranks skip the step of parameters and scheduler; the next is applied."""
    accelerator = kit.accelerator()
    topology = accelerator.backend.topology
    model: Any = models.build("dense")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler: Any = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = models.dense_data(6)
    x, y = x.to(accelerator.device), y.to(accelerator.device)
    rates = []
    for poison in (False, True, False):
        before = full_state(accelerator, model)
        loss = F.cross_entropy(model(x), y)
        if poison and topology.rank == topology.world_size - 1:
            loss = loss * float("inf")
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        assert bool(torch.isfinite(norm)) is not poison
        assert accelerator.optimizer_step_was_skipped is poison, f"skipped is not {poison} on rank {topology.rank}"
        after = full_state(accelerator, model)
        if poison:
            with diagnosis.meaning("a step whose gradients are not finite was applied"):
                assert_same_state(after, before, 0.0)
        else:
            assert any(not torch.equal(after[name], before[name]) for name in after), "the good step was not applied"
            assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values()), "not finite"
    assert rates == [0.05, 0.05, 0.1 / 3], f"learning rates {rates}"


@case()
def other_norms(kit: Kit) -> None:
    """The 1-norm and the largest element."""
    x, y = models.dense_data(12)
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    for kind in (1.0, float("inf")):
        step.zero_grad()
        backward(F.cross_entropy(plain(x), y))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.02, norm_type=kind)
        step.step()
        mine, labels = share(accelerator, x, y)
        accelerator.backward(F.cross_entropy(model(mine), labels))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.02, norm_type=kind)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert_same_state(full_state(accelerator, model), dict(plain.state_dict()), kit.atol)


@case()
def clips_by_value(kit: Kit) -> None:
    """Each element of the reduced gradient is clamped."""
    x, y = models.dense_data(12)
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = models.build("dense")
    step = SGD(plain.parameters(), lr=0.5)
    backward(F.cross_entropy(plain(x), y))
    nn.utils.clip_grad_value_(plain.parameters(), 0.005)
    step.step()
    mine, labels = share(accelerator, x, y)
    accelerator.backward(F.cross_entropy(model(mine), labels))
    accelerator.clip_grad_value_(model.parameters(), 0.005)
    before = full_state(accelerator, model)
    optimizer.step()
    after = full_state(accelerator, model)
    largest = max(float((after[name] - before[name]).abs().max()) / 0.5 for name in after)
    assert largest <= 0.005 + 1e-5, f"clip_grad_value_ had no effect: a step by a gradient of {largest:.3g}, not 0.005"
    assert_same_state(after, dict(plain.state_dict()), kit.atol)
