"""Averages and copies of weights."""

from __future__ import annotations

import copy

import torch
from parity_common import Net, build, loader, mean, noise, points, result, script
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import EMA


def start(accelerator, lr=0.3):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader())


def fit(accelerator, model, optimizer, batches, after):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
        after(len(losses))
    return losses


@script()
def ema_of_parameters(accelerator):
    """An exponential average of each parameter in a list, copied into the model at the end."""
    model, optimizer, batches = start(accelerator)
    shadow = [p.detach().clone() for p in model.parameters()]

    def update(step):
        with torch.no_grad():
            for average, p in zip(shadow, model.parameters(), strict=True):
                average.lerp_(p, 0.5)

    losses = fit(accelerator, model, optimizer, batches, update)
    with torch.no_grad():
        for average, p in zip(shadow, model.parameters(), strict=True):
            p.copy_(average)
    return result(accelerator, losses, model=model)


@script()
def ema_of_state_dict(accelerator):
    """An exponential average of ``model.state_dict()``, loaded into a model of the script's own and evaluated."""
    model, optimizer, batches = start(accelerator)
    shadow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(step):
        for name, value in model.state_dict().items():
            shadow[name].lerp_(value, 0.5)

    losses = fit(accelerator, model, optimizer, batches, update)
    average = Net()
    average.load_state_dict(shadow)
    losses.append(average(points()[0]).pow(2).mean().item())
    return result(accelerator, losses, model=model)


@script()
def ema_copy(accelerator):
    """``copy.deepcopy`` of the prepared model holds the average, and is evaluated."""
    model, optimizer, batches = start(accelerator)
    average = copy.deepcopy(model).eval()

    def update(step):
        with torch.no_grad():
            for mine, p in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.5)

    losses = fit(accelerator, model, optimizer, batches, update)
    with torch.no_grad():
        losses.append(mean(accelerator, average(points()[0]).pow(2).mean()))
    return result(accelerator, losses, model=model)


@script()
def ema_averaged_model(accelerator):
    """torch's ``AveragedModel`` of the prepared model, evaluated at the end."""
    model, optimizer, batches = start(accelerator)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = fit(accelerator, model, optimizer, batches, lambda step: average.update_parameters(model))
    with torch.no_grad():
        losses.append(mean(accelerator, average(points()[0]).pow(2).mean()))
    return result(accelerator, losses, model=model)


@script()
def ema_averaged_unwrapped(accelerator):
    """torch's ``AveragedModel`` of ``unwrap_model(model)``, evaluated at the end."""
    model, optimizer, batches = start(accelerator)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = fit(
        accelerator, model, optimizer, batches, lambda step: average.update_parameters(accelerator.unwrap_model(model))
    )
    with torch.no_grad():
        losses.append(mean(accelerator, average(points()[0]).pow(2).mean()))
    return result(accelerator, losses, model=model)


def _averaged():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = []
    for x, y in loader():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        average.update_parameters(model)
    return losses, {f"model.{name}": value for name, value in average.module.state_dict().items()}


@script(reference=_averaged)
def ema_of_the_library(accelerator):
    """Drivetrain's ``EMA``, whose weights the model has inside ``ema.averaged()``; torch's average is the reference."""
    model, optimizer, batches = start(accelerator)
    average = EMA(accelerator, model, decay=0.5)
    losses = fit(accelerator, model, optimizer, batches, lambda step: average.update())
    with average.averaged():
        return result(accelerator, losses, model=model)


def _averaged_with_loaded():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = []
    for step, (x, y) in enumerate(loader()):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            model.load_state_dict(build(seed=5).state_dict())
        average.update_parameters(model)
    weights = {f"average.{name}": value for name, value in average.module.state_dict().items()}
    return losses, weights | {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_averaged_with_loaded)
def ema_of_loaded_weights(accelerator):
    """Drivetrain's ``EMA`` of weights that the script loads on the way; after ``averaged()`` the model has its own."""
    model, optimizer, batches = start(accelerator)
    average = EMA(accelerator, model, decay=0.5)

    def after(step):
        if step == 2:
            model.load_state_dict(build(seed=5).state_dict())
        average.update()

    losses = fit(accelerator, model, optimizer, batches, after)
    with average.averaged():
        _, averaged = result(accelerator, losses, average=model)
    _, weights = result(accelerator, losses, model=model)
    return losses, averaged | weights



@script()
def stochastic_weight_averaging(accelerator):
    """An average of the weights after each of the last steps, from whole weights of the accelerator."""
    model, optimizer, batches = start(accelerator)
    kept = []

    def keep(step):
        if step > 1:
            kept.append(accelerator.get_state_dict(model))
            kept[-1] = {name: value.clone() for name, value in kept[-1].items()}

    losses = fit(accelerator, model, optimizer, batches, keep)
    averaged = {f"average.{name}": torch.stack([each[name] for each in kept]).mean(0) for name in kept[0]}
    losses, weights = result(accelerator, losses, model=model)
    return losses, weights | averaged


@script()
def lookahead(accelerator):
    """Lookahead by hand: every second step, slow weights move half way and are copied back."""
    model, optimizer, batches = start(accelerator)
    slow = [p.detach().clone() for p in model.parameters()]

    def after(step):
        if step % 2 == 0:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept.add_(p - kept, alpha=0.5)
                    p.copy_(kept)

    return result(accelerator, fit(accelerator, model, optimizer, batches, after), model=model)


@script()
def mean_teacher(accelerator):
    """A teacher that is the student's moving average, copied before ``prepare``, and a consistency loss."""
    model = build()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = points()
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, y, noise(*x.shape)))
    losses = []
    for x, y, z in batches:
        loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x + 0.1 * z), teacher(x))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for mine, p in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.5)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def target_network(accelerator):
    """A target network, prepared too, is brought up to date by ``load_state_dict`` every other step."""
    model = build()
    target = build().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, _ = points()
    model, target, optimizer, batches = accelerator.prepare(model, target, optimizer, loader(x, noise(*x.shape)))
    losses = []
    for step, (x, z) in enumerate(batches):
        with torch.no_grad():
            goal = z[:, :4] + 0.9 * target(x)
        loss = F.mse_loss(model(x), goal)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 2 == 1:
            target.load_state_dict(model.state_dict())
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model, target=target)


@script()
def sum_of_tokens_over_those_of_all_ranks(accelerator):
    """A sum over this rank's labels is divided by those of all ranks, times the ranks that losses are averaged over."""
    model = build()
    x, y = points()
    y = torch.where(torch.arange(len(y)) % 5 == 0, -100, y)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), loader(x, y))
    for inputs, labels in batches:
        count = accelerator.reduce((labels != -100).sum(), "sum")
        loss = F.cross_entropy(model(inputs), labels, ignore_index=-100, reduction="sum")
        accelerator.backward(loss * accelerator.data_parallel_size / count)
        optimizer.step()
        optimizer.zero_grad()
    return result(accelerator, [], model=model)
