"""Tensors and arrays that a script takes from its model before ``prepare``, and reads or writes after it."""

from __future__ import annotations

import copy

import torch
from parity_common import BATCH, CLASSES, Net, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F


def nothing(_step): ...


def fit(accelerator, model, after=nothing, log=list):
    """Four steps; ``after(step)`` follows each, and what ``log()`` returns is compared as losses are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        after(len(losses))
        losses += [mean(accelerator, loss), *log()]
    return result(accelerator, losses, model=model)


# ---- written after prepare -------------------------------------------------------------------------------------------


@script()
def data_that_was_listed_is_shrunk(accelerator):
    """``[p.data for p in model.parameters()]``, taken before ``prepare``, is shrunk after each step."""
    model = build()
    listed = [p.data for p in model.parameters()]

    def after(_step):
        for data in listed:
            data.mul_(0.9)

    return fit(accelerator, model, after)


@script()
def array_that_was_taken_is_written(accelerator):
    """``array = p.detach().numpy()``, taken before ``prepare``: a row of it is set to zero after each step."""
    model = build()
    array = model.head.weight.detach().numpy()

    def after(_step):
        array[1] = 0.0

    return fit(accelerator, model, after)


# ---- read after prepare ----------------------------------------------------------------------------------------------


@script()
def state_dict_that_was_taken_is_logged(accelerator):
    """``model.state_dict()``, taken before ``prepare`` and not copied, shows the weights of each step."""
    model = build()
    state = model.state_dict()
    return fit(accelerator, model, log=lambda: [value.pow(2).mean().item() for value in state.values()])


@script()
def state_dict_that_was_taken_is_loaded(accelerator):
    """The same is loaded back after two steps, which changes nothing: it shows the weights of now."""
    model = build()
    state = model.state_dict()

    def after(step):
        if step == 2:
            model.load_state_dict(state)

    return fit(accelerator, model, after)


@script()
def teacher_in_the_memory_of_the_student(accelerator):
    """A teacher that loads ``student.state_dict()`` with ``assign=True`` is the student itself."""
    model, teacher = build(), build(seed=3)
    teacher.load_state_dict(model.state_dict(), assign=True)
    x, _ = points()
    return fit(accelerator, model, log=lambda: [teacher(x).pow(2).mean().item()])


class Prototypes(nn.Module):
    """The distances to one point for each class, which begin as samples; ``(B, F) -> (B, C)``."""

    def __init__(self, samples):
        super().__init__()
        self.centres, self.scale = nn.Linear(*samples.shape[::-1], bias=False), nn.Linear(CLASSES, CLASSES)
        self.centres.weight = nn.Parameter(samples)

    def forward(self, x):
        return self.scale(-(x[:, None] - self.centres.weight).pow(2).sum(2))


@script()
def samples_that_are_parameters(accelerator):
    """Prototypes are ``nn.Parameter(x[:4])`` of the data set's own rows, which move with them."""
    x, y = points()
    model = build(lambda: Prototypes(x[:CLASSES]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, y))
    losses = []
    for _ in range(2):
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Remembering(Net):
    """Its forward adds a sum over rows of its own weight, which it took in its constructor."""

    def __init__(self):
        super().__init__()
        self.rows = [self.head.weight.data[:2]]

    def forward(self, x):
        return super().forward(x) + 0.1 * self.rows[0].sum()


@script()
def weight_that_a_forward_took_in_its_constructor(accelerator):
    """A module keeps ``weight.data[:2]`` in a list, and computes with it."""
    return fit(accelerator, build(Remembering))


# ---- right everywhere ------------------------------------------------------------------------------------------------


@script()
def first_values_read_before_the_first_step(accelerator):
    """What was taken before ``prepare`` gives the first weights to another model, and to a log, before training."""
    model = build()
    state, weight = model.state_dict(), model.head.weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    other = build(seed=9)
    other.load_state_dict(state)
    kept = copy.deepcopy(state)
    losses = [weight.norm().item()]
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses += [mean(accelerator, each) for each in (loss, other(x).pow(2).mean())]
    return result(accelerator, [*losses, *(value.norm().item() for value in kept.values())], model=model)


@script()
def names_that_are_left_over(accelerator):
    """Names of loops and of initialisation still refer to weights and to their arrays, and nobody uses them."""
    model = build()
    size = 0
    for value in model.state_dict().values():
        size += value.numel()
    weight = model.head.weight.data
    weight.mul_(0.5)
    first = float(model.head.bias.detach().numpy().sum())
    losses, weights = fit(accelerator, model)
    return [*losses, first, size / (BATCH * 100), float(value.dim() + weight.dim())], weights


@script(
    follows="data_that_was_listed_is_shrunk array_that_was_taken_is_written "
    "state_dict_that_was_taken_is_logged state_dict_that_was_taken_is_loaded "
    "teacher_in_the_memory_of_the_student samples_that_are_parameters "
    "weight_that_a_forward_took_in_its_constructor"
)
def taken_again_after_prepare(accelerator):
    """What the refusals advise: first values are copied before ``prepare``, and the rest is taken after it."""
    model = build()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        losses.append(mean(accelerator, loss))
    losses, weights = result(accelerator, losses, model=model)
    here = {name: weights[f"model.{name}"] for name in first if f"model.{name}" in weights}
    return losses, weights | {f"{name} moved": value - first[name] for name, value in here.items()}
