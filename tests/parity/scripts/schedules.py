"""Schedules that a script moves by its own rules, and optimizers that change while a model trains."""

from __future__ import annotations

import warnings

import torch
from parity_common import BATCH, build, loader, mean, points, result, script
from torch.nn import functional as F
from torch.optim import SGD, lr_scheduler


def begin(accelerator, schedule, lr=0.5, **settings):
    """A model, its optimizer, batches and a schedule, prepared together."""
    model = build()
    optimizer = SGD(model.parameters(), lr=lr, **settings)
    return accelerator.prepare(model, optimizer, loader(), schedule(optimizer))


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


# ---- moves that no optimizer step precedes --------------------------------------------------------------------------


@script()
def schedule_brought_forward(accelerator):
    """``for _ in range(start): scheduler.step()``, as a run that goes on in epoch 3 does without a state dict."""
    model, optimizer, batches, scheduler = begin(accelerator, lambda o: lr_scheduler.StepLR(o, 1, 0.8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: no optimizer step came before.
        for _ in range(3):
            scheduler.step()
    losses = rates(optimizer)
    for x, y in batches:
        losses.append(step_on(accelerator, model, optimizer, x, y))
        scheduler.step()
    return result(accelerator, losses + rates(optimizer), model=model)


@script()
def schedule_before_the_optimizer(accelerator):
    """``scheduler.step()`` at the top of the loop, before ``optimizer.step()``, as torch 1.0 had it."""
    model, optimizer, batches, scheduler = begin(
        accelerator, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), momentum=0.5
    )
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches:
            scheduler.step()
            losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses + rates(optimizer), model=model)


@script()
def schedule_moved_twice_a_step(accelerator):
    """Two moves after each step, and three in the middle of the run: the script skips a part of its schedule."""
    model, optimizer, batches, scheduler = begin(accelerator, lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    losses = []
    for number, (x, y) in enumerate(batches):
        losses.append(step_on(accelerator, model, optimizer, x, y))
        for _ in range(3 if number == 1 else 2):
            scheduler.step()
        losses += rates(optimizer)
    return result(accelerator, losses, model=model)


@script()
def plateau_before_training(accelerator):
    """``ReduceLROnPlateau`` is given the loss before training, and the whole batch's after each step."""
    model, optimizer, batches, scheduler = begin(
        accelerator, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.4)
    )
    scheduler.step(1.5)
    losses = []
    for x, y in batches:
        losses.append(step_on(accelerator, model, optimizer, x, y))
        scheduler.step(losses[-1])
        losses += rates(optimizer)
    return result(accelerator, losses, model=model)


@script()
def schedules_by_step_and_by_epoch(accelerator):
    """One schedule moves after each step, another one of the same optimizer after each epoch and before the first."""
    model, optimizer, batches, by_step = begin(accelerator, lambda o: lr_scheduler.ExponentialLR(o, 0.95))
    by_epoch = accelerator.prepare(lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.7))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_epoch.step()
    for _ in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
            by_step.step()
        by_epoch.step()
        losses += rates(optimizer)
    return result(accelerator, losses, model=model)


@script()
def schedule_begun_again(accelerator):
    """A second schedule, made of the prepared optimizer in the middle of the run and brought to where it stands."""
    model, optimizer, batches, scheduler = begin(
        accelerator, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8), momentum=0.9
    )
    losses = []
    for epoch in range(2):
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
            scheduler.step()
        if epoch == 0:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = 0.3
            scheduler = accelerator.prepare(lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6))
            scheduler.step()
            scheduler.step()
    return result(accelerator, losses + rates(optimizer), model=model)


# ---- a metric of each rank ------------------------------------------------------------------------------------------


@script()
def plateau_of_a_ranks_own_loss(accelerator):
    """``ReduceLROnPlateau`` is given the loss of this rank's rows, as code for one process has it."""
    model, optimizer, batches, scheduler = begin(
        accelerator, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.15)
    )
    losses = []
    for _ in range(2):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
            scheduler.step(loss.item())
            losses += rates(optimizer)
    return result(accelerator, losses, model=model)


@script()
def plateau_of_a_ranks_own_accuracy(accelerator):
    """``mode="max"``, a tensor for a metric, in an epoch that a warm-up by hand precedes."""
    model, optimizer, batches, scheduler = begin(
        accelerator, lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", factor=0.1, patience=1, threshold=0.01)
    )
    losses = []
    for epoch in range(4):
        right = []
        for x, y in batches:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
            right.append((logits.argmax(1) == y).float().mean())
        scheduler.step(torch.stack(right).mean() if epoch < 2 else torch.tensor(0.1 + 0.0 * accelerator.process_index))
        losses += rates(optimizer)
    return result(accelerator, losses, model=model)


# ---- windows --------------------------------------------------------------------------------------------------------


def _in_windows(first):
    model = build()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.6)
    x, y = points(8 * BATCH)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in range(0, len(x), 2 * BATCH):
            if first:
                scheduler.step()
            rows = slice(start, start + 2 * BATCH)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if not first:
                scheduler.step()
            losses += rates(optimizer)
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


def _windows(accelerator, *, first, apart=False):
    model = build()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.6)
    if apart:
        scheduler = accelerator.prepare(scheduler)
        model = accelerator.prepare(model)
        optimizer, batches = accelerator.prepare(optimizer, loader(*points(8 * BATCH)))
    else:
        model, optimizer, batches, scheduler = accelerator.prepare(
            model, optimizer, loader(*points(8 * BATCH)), scheduler
        )
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches:
            with accelerator.accumulate(model):
                if first:
                    scheduler.step()
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if not first:
                    scheduler.step()
                if accelerator.sync_gradients:
                    losses += rates(optimizer)
    return result(accelerator, losses, model=model)


@script(reference=lambda: _in_windows(first=True), gradient_accumulation_steps=2)
def schedule_first_in_windows(accelerator):
    """``scheduler.step()`` at the top of each micro-batch, in windows of two."""
    return _windows(accelerator, first=True)


@script(reference=lambda: _in_windows(first=False), gradient_accumulation_steps=2)
def schedule_prepared_before_its_optimizer(accelerator):
    """The scheduler is prepared by a call of its own, before model and optimizer are; windows of two."""
    return _windows(accelerator, first=False, apart=True)


def _skipping():
    model = build()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.6)
    x, y = points()
    losses = []
    for _ in range(2):
        for start in range(0, len(x), BATCH):
            if start == BATCH:
                continue
            rows = slice(start, start + BATCH)
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses += [loss.item(), *rates(optimizer)]
        for _ in range(2):
            scheduler.step()
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_skipping)
def schedule_over_skipped_steps(accelerator):
    """A step that is skipped moves nothing; two further moves after each epoch do."""
    model, optimizer, batches, scheduler = begin(accelerator, lambda o: lr_scheduler.ExponentialLR(o, 0.6))
    losses = []
    for _ in range(2):
        for number, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss * float("nan") if number == 1 else loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            scheduler.step()
            if number != 1:
                losses += [mean(accelerator, loss), *rates(optimizer)]
        for _ in range(2):
            scheduler.step()
    return result(accelerator, losses, model=model)


@script()
def schedule_handed_over_to_that_of_an_average(accelerator):
    """A cosine schedule for the first epoch, then ``SWALR``, both moved by epoch."""
    model, optimizer, batches, cosine = begin(accelerator, lambda o: lr_scheduler.CosineAnnealingLR(o, 8))
    average = accelerator.prepare(torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3))
    losses = []
    for epoch in range(3):
        for x, y in batches:
            losses += [step_on(accelerator, model, optimizer, x, y), *rates(optimizer)]
        (average if epoch else cosine).step()
    return result(accelerator, losses, model=model)


@script()
def schedule_by_samples_with_momentum(accelerator):
    """``CyclicLR`` moves once for each sample of the batch, and the momentum with it."""
    model, optimizer, batches, cycle = begin(
        accelerator, lambda o: lr_scheduler.CyclicLR(o, 0.05, 0.5, step_size_up=20), momentum=0.9
    )
    losses = []
    for x, y in batches:
        losses.append(step_on(accelerator, model, optimizer, x, y))
        for _ in range(BATCH):
            cycle.step()
        losses += [*rates(optimizer), optimizer.param_groups[0]["momentum"]]
    return result(accelerator, losses, model=model)
