"""Optimizers of one model that step at their own pace, groups that change, layers used late, second phases."""

from __future__ import annotations

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, lr_scheduler


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


# ---- optimizers of one model at their own pace ----------------------------------------------------------------------


def parts_of(model):
    return [model.body[0], model.body[2], model.head]


def at_paces(accelerator, paces, make, *, clip=None, epochs=1):
    """Each part of the model has an optimizer, which steps and drops its gradients at every so many batches."""
    model = build()
    optimizers = [make(part.parameters()) for part in parts_of(model)[-len(paces) :]]
    model, batches, *optimizers = accelerator.prepare(model, loader(), *optimizers)
    parts = parts_of(model)[-len(paces) :]
    losses, number = [], 0
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            losses.append(mean(accelerator, loss))
            number += 1
            if clip == "all":
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            for part, optimizer, pace in zip(parts, optimizers, paces, strict=True):
                if number % pace == 0:
                    if clip == "parts":
                        losses.append(float(accelerator.clip_grad_norm_(part.parameters(), 0.2)))
                    optimizer.step()
                    optimizer.zero_grad()
    return result(accelerator, losses, model=model)


@script()
def three_paces(accelerator):
    """Three optimizers with momentum step at every batch, every second and every third; gradients add up meanwhile."""
    return at_paces(accelerator, (3, 2, 1), lambda each: SGD(each, lr=0.1, momentum=0.9), epochs=3)


@script()
def head_at_half_pace_clipped(accelerator):
    """The head gathers two batches; each optimizer's parameters are clipped before its step."""
    return at_paces(accelerator, (1, 2), lambda each: SGD(each, lr=0.3), clip="parts", epochs=2)


@script()
def waiting_gradients_clipped(accelerator):
    """The whole model is clipped at each batch, also the gradients that wait for the slower optimizer."""
    return at_paces(accelerator, (2, 1, 1), lambda each: SGD(each, lr=0.3, momentum=0.5), clip="all", epochs=2)


@script()
def adam_at_two_paces(accelerator):
    """Two AdamW, one of which steps at every third batch."""
    return at_paces(accelerator, (3, 1), lambda each: AdamW(each, lr=0.02), epochs=2)


def accumulated_at_paces():
    model = build()
    body, head = SGD(model.body.parameters(), lr=0.2), SGD(model.head.parameters(), lr=0.3, momentum=0.9)
    losses = []
    x, y = points(8 * BATCH)
    for number in range(8):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            losses.append(float(nn.utils.clip_grad_norm_(model.head.parameters(), 0.2)))
            head.step()
            head.zero_grad()
        if number % 4 == 3:
            body.step()
            body.zero_grad()
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=accumulated_at_paces, gradient_accumulation_steps=2)
def paces_over_windows(accelerator):
    """``accumulate`` over two batches; the head is clipped and steps after each window, the body after two windows."""
    model = build()
    body, head = SGD(model.body.parameters(), lr=0.2), SGD(model.head.parameters(), lr=0.3, momentum=0.9)
    model, body, head, batches = accelerator.prepare(model, body, head, loader(*points(8 * BATCH)))
    losses, windows = [], 0
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            losses.append(mean(accelerator, loss))
            if accelerator.sync_gradients:
                windows += 1
                losses.append(float(accelerator.clip_grad_norm_(model.head.parameters(), 0.2)))
                head.step()
                head.zero_grad()
                if windows % 2 == 0:
                    body.step()
                    body.zero_grad()
    return result(accelerator, losses, model=model)


# ---- groups that change ---------------------------------------------------------------------------------------------


def edited(accelerator, edit, make=lambda groups: SGD(groups, lr=0.3, momentum=0.5)):
    """Body and head are groups of one optimizer; ``edit(model, optimizer)`` comes after two batches."""
    model = build()
    optimizer = make([{"params": list(part.parameters())} for part in (model.body, model.head)])
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for epoch in range(2):
        for number, (x, y) in enumerate(batches):
            if (epoch, number) == (0, 2):
                optimizer = edit(model, optimizer) or optimizer
            losses.append(step_on(accelerator, model, optimizer, x, y))
    return result(accelerator, losses, model=model)


@script()
def group_narrowed(accelerator):
    """``param_groups[0]["params"] = [...]``: the rest of that group stays as it is from now on."""

    def narrow(model, optimizer):
        optimizer.param_groups[0]["params"] = list(model.body[2].parameters())

    return edited(accelerator, narrow)


@script()
def parameter_moved_between_groups(accelerator):
    """A layer goes from the body's group to the head's, which has another rate and weight decay."""

    def move(model, optimizer):
        body, head = optimizer.param_groups
        head["lr"], head["weight_decay"] = 0.05, 0.1
        layer = list(model.body[2].parameters())
        body["params"] = list(model.body[0].parameters())
        head["params"] = layer + list(model.head.parameters())

    return edited(accelerator, move)


@script()
def groups_replaced(accelerator):
    """``param_groups[:] = [...]``: other dictionaries, of decayed weights and of biases, under AdamW."""

    def replace(model, optimizer):
        settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizer.param_groups[:] = [
            {**settings, "params": weights, "weight_decay": 0.1},
            {**settings, "params": biases, "weight_decay": 0.0},
        ]

    return edited(accelerator, replace, lambda groups: AdamW(groups, lr=0.02))


@script()
def layer_popped_from_a_group(accelerator):
    """``group["params"].pop()`` and ``append``: one bias changes its group in place."""

    def pop(model, optimizer):
        body, head = optimizer.param_groups
        head["params"].append(body["params"].pop())
        head["lr"] = 0.1

    return edited(accelerator, pop)


@script()
def group_put_in_by_hand(accelerator):
    """``param_groups.append(...)`` of a group without parameters, past ``add_param_group``."""

    def put(model, optimizer):
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})

    return edited(accelerator, put)


@script()
def groups_assigned(accelerator):
    """``optimizer.param_groups = [...]``: other dictionaries of the same parameters."""

    def assign(model, optimizer):
        optimizer.param_groups = [{**group, "lr": 0.1} for group in optimizer.param_groups]

    return edited(accelerator, assign)


@script()
def group_emptied(accelerator):
    """``group["params"] = []``: the head is trained no more."""

    def empty(model, optimizer):
        optimizer.param_groups[1].update(params=[])

    return edited(accelerator, empty)


@script(
    follows="unfreezing_adds_group groups_replaced group_put_in_by_hand groups_assigned group_taken_out "
    "parameter_moved_between_groups"
)
def other_groups_by_a_new_optimizer(accelerator):
    """What a refused edit of groups advises: another optimizer, whose groups are other ones, prepared on the way."""

    def replace(model, optimizer):
        optimizer.zero_grad()
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]
        return accelerator.prepare(SGD(groups, lr=0.2, momentum=0.5))

    return edited(accelerator, replace)


@script(follows="group_narrowed group_emptied layer_popped_from_a_group")
def layer_stopped_by_freezing(accelerator):
    """The same advice for parameters that stop: ``requires_grad_(False)`` instead of an edit of the group."""

    def freeze(model, optimizer):
        model.body[0].requires_grad_(False)

    return edited(accelerator, freeze, lambda groups: AdamW(groups, lr=0.02, weight_decay=0.1))


# ---- a layer that is used late --------------------------------------------------------------------------------------


class Late(nn.Module):
    """An auxiliary layer of which the first batches make no use; ``(B, F) -> (B, C)``."""

    def __init__(self):
        super().__init__()
        self.net, self.extra = Net(), nn.Linear(FEATURES, CLASSES)

    def forward(self, x, late=False):
        return self.net(x) + self.extra(x) if late else self.net(x)


def whole(model):
    return [{"params": model.parameters()}]


def apart(model):
    return [{"params": model.net.parameters()}, {"params": model.extra.parameters(), "lr": 0.05}]


def late_plain(make, groups):
    """Plain torch, saved and resumed nowhere."""
    model = build(Late)
    optimizer = make(groups(model))
    x, y = points()
    losses = []
    for late in (False, True):
        for first in range(0, len(x), BATCH):
            rows = slice(first, first + BATCH)
            loss = F.cross_entropy(model(x[rows], late), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


def late_step(accelerator, model, optimizer, x, y, late):
    loss = F.cross_entropy(model(x, late), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


def late_here(accelerator, make, groups, *, resume):
    model = build(Late)
    model, optimizer, batches = accelerator.prepare(model, make(groups(model)), loader())
    losses = [late_step(accelerator, model, optimizer, x, y, late=False) for x, y in batches]
    if resume:
        accelerator.save_state(f"{accelerator.project_dir}/late")
        model, optimizer, batches = accelerator.free_memory(model, optimizer, batches)
        model = build(Late, seed=77)
        model, optimizer, batches = accelerator.prepare(model, make(groups(model)), loader())
        accelerator.load_state(f"{accelerator.project_dir}/late")
    losses += [late_step(accelerator, model, optimizer, x, y, late=True) for x, y in batches]
    return result(accelerator, losses, model=model)


def adamw(parameters):
    return AdamW(parameters, lr=0.03)


def momentum(parameters):
    return SGD(parameters, lr=0.2, momentum=0.9)


@script(reference=lambda: late_plain(adamw, whole))
def layer_used_late(accelerator):
    """A layer has its first gradient in the second epoch, under AdamW."""
    return late_here(accelerator, adamw, whole, resume=False)


@script()
def layer_never_used(accelerator):
    """The optimizer holds a layer that no forward uses, under AdamW with weight decay: it stays as it is."""
    model = build(Late)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return result(accelerator, [step_on(accelerator, model, optimizer, x, y) for x, y in batches], model=model)


@script(reference=lambda: late_plain(adamw, whole))
def layer_used_after_a_resume(accelerator):
    """The same, where the run is saved and resumed between the epochs: it ends as the uninterrupted run does."""
    return late_here(accelerator, adamw, whole, resume=True)


@script(reference=lambda: late_plain(momentum, whole))
def layer_used_after_a_resume_by_sgd(accelerator):
    """The same under SGD with momentum, which counts no steps."""
    return late_here(accelerator, momentum, whole, resume=True)


@script(reference=lambda: late_plain(adamw, apart))
def late_layer_in_its_group(accelerator):
    """The late layer has a parameter group of its own, as the refusal of a shared one advises; AdamW, resumed."""
    return late_here(accelerator, adamw, apart, resume=True)


def optimizers_plain():
    """Plain torch: two optimizers, of which the second finds no gradients in the first epoch."""
    model = build(Late)
    optimizers = [AdamW(model.net.parameters(), lr=0.03), AdamW(model.extra.parameters(), lr=0.05)]
    x, y = points()
    losses = []
    for late in (False, True):
        for first in range(0, len(x), BATCH):
            rows = slice(first, first + BATCH)
            loss = F.cross_entropy(model(x[rows], late), y[rows])
            loss.backward()
            losses.append(loss.item())
            for each in optimizers:
                each.step()
                each.zero_grad()
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=optimizers_plain)
def late_layer_in_its_optimizer(accelerator):
    """The late layer has an optimizer of its own, whose ``step`` has nothing to do at first."""
    model = build(Late)
    optimizers = AdamW(model.net.parameters(), lr=0.03), AdamW(model.extra.parameters(), lr=0.05)
    model, batches, *optimizers = accelerator.prepare(model, loader(), *optimizers)
    losses = []
    for late in (False, True):
        for x, y in batches:
            loss = F.cross_entropy(model(x, late), y)
            accelerator.backward(loss)
            losses.append(mean(accelerator, loss))
            for each in optimizers:
                each.step()
                each.zero_grad()
    return result(accelerator, losses, model=model)


@script()
def body_waits_in_its_optimizer(accelerator):
    """Head and body have optimizers, prepared together; the body's only drops its gradients in the first epoch."""
    model = build()
    body, head = Adam(model.body.parameters(), lr=0.02), SGD(model.head.parameters(), lr=0.2, momentum=0.9)
    model, body, head, batches = accelerator.prepare(model, body, head, loader())
    losses = []
    for epoch in range(2):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            losses.append(mean(accelerator, loss))
            head.step()
            if epoch:
                body.step()
            body.zero_grad()
            head.zero_grad()
    return result(accelerator, losses, model=model)


# ---- a second phase with a new optimizer ----------------------------------------------------------------------------


def everything(model):
    return SGD(model.parameters(), lr=0.2, momentum=0.9)


def in_phases(accelerator, second, *, freeze=True, prepare_model=False):
    """The head first, then what ``second(model)`` steps."""
    model = build()
    if freeze:
        model.body.requires_grad_(False)
    optimizer = AdamW(model.head.parameters() if freeze else model.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    model.body.requires_grad_(True)
    optimizer.zero_grad()
    optimizer = second(model)
    if prepare_model:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    losses += [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


@script(follows="gradual_unfreezing")
def head_first_then_all(accelerator):
    """Fine-tuning in two phases: ``accelerator.prepare(new_optimizer)`` after the body is unfrozen."""
    return in_phases(accelerator, everything)


@script()
def head_first_then_all_with_the_model(accelerator):
    """The same, where the second ``prepare`` is given the model again."""
    return in_phases(accelerator, everything, prepare_model=True)


@script(follows="optimizer_swapped old_optimizer_steps_again")
def another_optimizer_of_the_same(accelerator):
    """AdamW of all parameters, then another AdamW of all of them with a lower rate for the body."""

    def second(model):
        groups = [{"params": model.body.parameters(), "lr": 0.01}, {"params": model.head.parameters()}]
        return AdamW(groups, lr=0.03)

    return in_phases(accelerator, second, freeze=False)


@script()
def one_optimizer_becomes_two(accelerator):
    """One optimizer of all parameters, then one of the body and one of the head, prepared together."""
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    optimizer.zero_grad()
    body, head = accelerator.prepare(SGD(model.body.parameters(), lr=0.1), AdamW(model.head.parameters(), lr=0.02))
    for number, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        head.step()
        head.zero_grad()
        if number % 2:
            body.step()
            body.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def body_gets_a_third_optimizer(accelerator):
    """The body's optimizer is exchanged for another one, while the head's goes on with its momentum."""
    model = build()
    body, head = SGD(model.body.parameters(), lr=0.1), SGD(model.head.parameters(), lr=0.2, momentum=0.9)
    model, body, head, batches = accelerator.prepare(model, body, head, loader())
    losses = []
    for epoch in range(2):
        if epoch:
            body = accelerator.prepare(AdamW(model.body.parameters(), lr=0.02))
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            losses.append(mean(accelerator, loss))
            for each in (body, head):
                each.step()
                each.zero_grad()
    return result(accelerator, losses, model=model)


@script()
def three_phases_with_schedules(accelerator):
    """All parameters, then the head alone, then all again, each phase with an optimizer and a schedule of its own."""
    model = build()
    model, batches = accelerator.prepare(model, loader())
    losses = []
    for phase, make in enumerate((everything, lambda its: Adam(its.head.parameters(), lr=0.02), everything)):
        model.body.requires_grad_(phase != 1)
        optimizer = make(model)
        optimizer, scheduler = accelerator.prepare(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.8))
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
            scheduler.step()
        losses.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
    return result(accelerator, losses, model=model)


def resumed_plain():
    """Plain torch, saved and resumed nowhere."""
    model = build()
    model.body.requires_grad_(False)
    optimizer = Adam(model.head.parameters(), lr=0.05)
    x, y = points()
    losses = []
    for epoch in range(3):
        if epoch == 1:
            model.body.requires_grad_(True)
            optimizer = Adam(model.parameters(), lr=0.02)
        for first in range(0, len(x), BATCH):
            rows = slice(first, first + BATCH)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=resumed_plain)
def second_phase_resumed(accelerator):
    """A checkpoint of the second phase is resumed by a run that prepares the second optimizer alone."""
    model = build()
    model.body.requires_grad_(False)
    head = Adam(model.head.parameters(), lr=0.05)
    model, head, batches = accelerator.prepare(model, head, loader())
    losses = [step_on(accelerator, model, head, x, y) for x, y in batches]
    model.body.requires_grad_(True)
    head.zero_grad()
    optimizer = accelerator.prepare(Adam(model.parameters(), lr=0.02))
    losses += [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    accelerator.save_state(f"{accelerator.project_dir}/second")
    model, head, optimizer, batches = accelerator.free_memory(model, head, optimizer, batches)
    model = build(seed=77)
    model, optimizer, batches = accelerator.prepare(model, Adam(model.parameters(), lr=0.02), loader())
    accelerator.load_state(f"{accelerator.project_dir}/second")
    losses += [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def old_optimizer_steps_again(accelerator):
    """A second optimizer of the same parameters is prepared later, and the two step in turn."""
    model = build()
    first = SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, first, batches = accelerator.prepare(model, first, loader())
    losses = [step_on(accelerator, model, first, x, y) for x, y in batches]
    second = accelerator.prepare(AdamW(model.parameters(), lr=0.02))
    for number, (x, y) in enumerate(batches):
        losses.append(step_on(accelerator, model, (second, first)[number % 2], x, y))
    return result(accelerator, losses, model=model)


@script()
def a_network_that_grows(accelerator):
    """Progressive growing: a block is put behind the body after a phase, and the model is prepared anew."""
    model, losses = build(), []
    for phase in range(2):
        if phase:
            model = accelerator.unwrap_model(model)
            torch.manual_seed(7)
            model.body = nn.Sequential(model.body, nn.Linear(16, 16), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)
