"""What ranks do apart: what they may, and what would add up batches that do not belong together."""

from __future__ import annotations

import time

import torch
from parity_common import build, loader, mean, noise, result, script
from torch.nn import functional as F


def start(accelerator):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader())


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


@script()
def each_rank_skips_another_batch(accelerator):
    """``continue`` at another batch on each rank, as for a sample that is broken: nothing hangs."""
    model, optimizer, batches = start(accelerator)
    losses = [
        step_on(accelerator, model, optimizer, x, y)
        for _ in range(2)
        for index, (x, y) in enumerate(batches)
        if index != accelerator.process_index
    ]
    return result(accelerator, losses, model=model)


@script()
def all_ranks_skip_a_batch(accelerator):
    """``continue`` where any rank has a broken sample, on which the ranks agree first."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for index, (x, y) in enumerate(batches):
        bad = torch.tensor(float(index == 1 and accelerator.process_index == 0))
        if accelerator.reduce(bad, "sum") > 0:
            continue
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def backward_from_two_lines(accelerator):
    """The main process calls ``backward`` at another line than the others."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if accelerator.is_main_process:
            accelerator.backward(loss)
        else:
            accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def one_rank_looks_into_another_loader(accelerator):
    """The main process takes a batch of a second loader, for a picture in the log, and keeps its iterator."""
    model, optimizer, batches = start(accelerator)
    pictures = accelerator.prepare(loader(noise(24, 8)))
    kept, losses = [], []
    for index, (x, y) in enumerate(batches):
        if accelerator.is_main_process and index == 1:
            kept.append(iter(pictures))
            next(kept[-1])
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def one_rank_is_slow(accelerator):
    """The main process rests for longer than ranks take to compare what they have done."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for index, (x, y) in enumerate(batches):
        if accelerator.is_main_process and index == 1:
            time.sleep(1.5)
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def ranks_note_something_in_groups(accelerator):
    """Each rank writes a note of its own into the optimizer's groups, beside what the optimizer reads."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.param_groups[0]["note"] = f"rank {accelerator.process_index}"
        losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)
