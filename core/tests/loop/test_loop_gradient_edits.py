"""A script that changes gradients between micro-batches changes those of all processes' samples, on real engines."""

from __future__ import annotations

import logging

import pytest
import torch
from kept_log import Kept
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_testing import spawn

WINDOWS, ROWS = 9, 12


def clip(accelerator, model, window):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_late(accelerator, model, window):
    if window >= 3:
        clip(accelerator, model, window)


def clip_at_the_end(accelerator, model, window):
    if accelerator.sync_gradients:
        clip(accelerator, model, window)


def edit_on_one_rank(accelerator, model, window):
    if not accelerator.sync_gradients and window == 0 and not accelerator.is_main_process:
        for each in model.parameters():
            each.grad.mul_(1.5)


def measure(accelerator, model, window):
    if not accelerator.sync_gradients:
        sum(each.grad.norm() for each in model.parameters() if each.grad is not None)


EDITS = {each.__name__: each for each in (clip, clip_late, clip_at_the_end, edit_on_one_rank, measure)}


def train(how, distributed_type):
    """Train in windows of two; for each window whether its first batch was reduced, the log, and the weights."""
    kept = Kept()
    logging.getLogger("drivetrain").addHandler(kept)
    accelerator = Accelerator(cpu=True, distributed_type=distributed_type, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randn(2 * WINDOWS * ROWS, 6), torch.randint(2, (2 * WINDOWS * ROWS,)))
    loader = DataLoader(data, ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reduced = []
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if step % 2 == 0:
                reduced.append(accelerator._loop.window.sync_each_batch)
            EDITS[how](accelerator, model, step // 2)
            optimizer.step()
            optimizer.zero_grad()
    weights = [each.double().tolist() for each in accelerator.get_state_dict(model).values()]
    return reduced, [line for line in kept.lines if "changes gradients of" in line], weights


PLACES = [("ddp", 2), ("ddp", 3), ("fsdp", 2)]


@pytest.mark.parametrize(("distributed_type", "world"), PLACES)
@pytest.mark.gate("ddp-3", "fsdp-2")
def test_gradients_clipped_in_each_micro_batch_are_those_of_all_samples(distributed_type, world):
    ((_, _, alone),) = spawn(train, 1, "clip", "single")
    ranks = spawn(train, world, "clip", distributed_type)
    for reduced, _, weights in ranks[: 1 if distributed_type == "fsdp" else world]:
        assert reduced == [True] * WINDOWS
        for ours, theirs in zip(weights, alone, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-6)
    assert [len(said) for _, said, _ in ranks] == [1] + [0] * (world - 1)
    assert "The script changes gradients of Sequential in micro-batches before the last one" in ranks[0][1][0]


@pytest.mark.parametrize("how", ["clip_at_the_end", "measure"])
@pytest.mark.parametrize("distributed_type", ["ddp", "fsdp"])
@pytest.mark.gate("ddp-measure", "fsdp-clip_at_the_end")
def test_other_scripts_reduce_each_micro_batch_of_a_few_windows(how, distributed_type):
    for reduced, said, _ in spawn(train, 2, how, distributed_type):
        assert [window for window, was in enumerate(reduced, 1) if was] == [1, 2, 4, 8]
        assert not said


def test_edits_that_begin_later_are_found_later():
    for reduced, _, _ in spawn(train, 2, "clip_late", "ddp"):
        assert reduced == [True, True, False, True, True, True, True, True, True]


def test_an_edit_on_one_rank_is_every_ranks():
    reduced = [found[0] for found in spawn(train, 2, "edit_on_one_rank", "ddp")]
    assert reduced == [[True] * WINDOWS] * 2


def hook_on_one_rank():
    accelerator = Accelerator(cpu=True, distributed_type="ddp", gradient_accumulation_steps=2)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.is_main_process:
        model.weight.register_hook(lambda grad: 1.0 * grad)
    reduced = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(6, 4)).square().mean())
            reduced.append(accelerator._loop.window.sync_each_batch)
            optimizer.step()
            optimizer.zero_grad()
    return reduced


def test_hooks_of_one_rank_leave_every_ranks_windows_alone():
    assert spawn(hook_on_one_rank, 2) == [[False] * 6] * 2


def two_players():
    """Windows of two models, of which one loss reaches both, take turns."""
    kept = Kept()
    logging.getLogger("drivetrain").addHandler(kept)
    accelerator = Accelerator(cpu=True, distributed_type="ddp", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    for _ in range(8):
        x, y = torch.randn(6, 4), torch.randint(2, (6,))
        for model, optimizer, shown in ((second, optimizers[1], first(x).detach()), (first, optimizers[0], None)):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(second(first(x) if shown is None else shown), y))
                optimizer.step()
                optimizer.zero_grad()
    return kept.lines


def test_a_backward_of_another_window_is_no_edit():
    assert not [line for lines in spawn(two_players, 2) for line in lines if "changes gradients of" in line]


def clip_inside(distributed_type, call):
    accelerator = Accelerator(cpu=True, distributed_type=distributed_type)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.randn(4, 6)).square().mean())
    with pytest.raises(
        UsageError, match=rf"{call} was called while gradients of Sequential are those of this rank"
    ) as e:
        getattr(accelerator, call)(model.parameters(), 0.1)
    assert "Clip after the last backward of a step, which reduces them" in str(e.value)
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 6)).square().mean())
    getattr(accelerator, call)(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("distributed_type", ["ddp", "fsdp", "deepspeed"])
def test_clipping_of_a_ranks_own_gradients_is_refused(distributed_type, call):
    spawn(clip_inside, 2, distributed_type, call)
