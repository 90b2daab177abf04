"""Gradients that the script edits, hooks, accumulates or takes by itself."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from parity_common import BATCH, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def start(accelerator, lr=0.3, kind=Net):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return accelerator.prepare(model, optimizer, loader())


def loop(accelerator, model, optimizer, batches):
    """The ordinary loop."""
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def fit(accelerator, edit, lr=0.3):
    """A loop that does ``edit(model, step)`` between backward and step."""
    model, optimizer, batches = start(accelerator, lr)
    losses = []
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        edit(model, step)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_scaled(accelerator):
    """``p.grad.mul_(0.5)`` between backward and step."""

    def edit(model, step):
        for p in model.parameters():
            p.grad.mul_(0.5)

    return fit(accelerator, edit)


@script()
def gradients_assigned(accelerator):
    """``p.grad = p.grad.sign() * 0.01`` between backward and step."""

    def edit(model, step):
        for p in model.parameters():
            p.grad = p.grad.sign() * 0.01

    return fit(accelerator, edit)


@script()
def gradients_dropped(accelerator):
    """``p.grad = None`` for one layer between backward and step."""

    def edit(model, step):
        model.head.weight.grad = None

    return fit(accelerator, edit)


@script()
def gradient_noise(accelerator):
    """Noise from a seed is added to each gradient."""

    def edit(model, step):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad.add_(0.05 * torch.randn(p.shape, generator=generator))

    return fit(accelerator, edit)


@script()
def torch_clip_grad_norm(accelerator):
    """``torch.nn.utils.clip_grad_norm_`` instead of the accelerator's; the norm is logged."""
    norms = []

    def edit(model, step):
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    losses, weights = fit(accelerator, edit)
    return losses + norms, weights


@script()
def torch_clip_grad_value(accelerator):
    """``torch.nn.utils.clip_grad_value_`` instead of the accelerator's."""
    return fit(accelerator, lambda model, step: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01))


@script(follows="torch_clip_grad_norm total_norm_then_clip window_by_hand_with_rest")
def clip_grad_norm(accelerator):
    """``accelerator.clip_grad_norm_``; the norm is logged."""
    norms = []

    def edit(model, step):
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))

    losses, weights = fit(accelerator, edit)
    return losses + norms, weights


@script(follows="torch_clip_grad_value clipped_by_groups gradients_clamped_by_hook")
def clip_grad_value(accelerator):
    """``accelerator.clip_grad_value_``."""
    return fit(accelerator, lambda model, step: accelerator.clip_grad_value_(model.parameters(), 0.01))


@script()
def gradient_norm_by_hand(accelerator):
    """The norm of all gradients, summed up by the script, sets the learning rate."""
    model, optimizer, batches = start(accelerator, 0.3)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        norm = float(sum((p.grad**2).sum() for p in model.parameters())) ** 0.5
        optimizer.param_groups[0]["lr"] = 0.1 / (norm + 0.1)
        optimizer.step()
        losses += [mean(accelerator, loss), norm]
    return result(accelerator, losses, model=model)


def mask_of(weight):
    """A fixed half of the elements."""
    return (torch.arange(weight.numel()) % 2 == 0).view(weight.shape).float()


@script()
def hook_before_prepare(accelerator):
    """``p.register_hook`` before ``prepare`` masks half of a layer's gradients (pruning)."""
    model = build()
    mask = mask_of(model.head.weight)
    model.head.weight.register_hook(lambda grad: grad * mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return loop(accelerator, model, optimizer, batches)


@script()
def hook_after_prepare(accelerator):
    """``p.register_hook`` after ``prepare`` masks half of a layer's gradients."""
    mask = mask_of(build().head.weight)
    model, optimizer, batches = start(accelerator)
    model.head.weight.register_hook(lambda grad: grad * mask)
    return loop(accelerator, model, optimizer, batches)


@script()
def hook_after_accumulate(accelerator):
    """``p.register_post_accumulate_grad_hook`` after ``prepare`` halves one layer's gradients."""
    model, optimizer, batches = start(accelerator)

    def halve(p):
        p.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(halve)
    return loop(accelerator, model, optimizer, batches)


@script()
def several_forwards(accelerator):
    """Three forwards of one model in one loss: the batch, a noisy one, a consistency term between them."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = points()
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, y, noise(*x.shape)))
    losses = []
    for x, y, z in batches:
        clean, near, far = model(x), model(x + 0.1 * z), model(x + 0.5 * z)
        loss = F.cross_entropy(clean, y) + F.mse_loss(near, clean) + F.mse_loss(far, near)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def several_backwards(accelerator):
    """Two losses, each with its forward and backward, before one step."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        first = F.cross_entropy(model(x), y)
        accelerator.backward(first)
        second = model(-x).pow(2).mean()
        accelerator.backward(second)
        optimizer.step()
        losses += [mean(accelerator, first), mean(accelerator, second)]
    return result(accelerator, losses, model=model)


def _two_losses(logits, y):
    return F.cross_entropy(logits, y), logits.pow(2).mean()


@script()
def two_losses_of_one_forward(accelerator):
    """One forward, two backwards through it with ``retain_graph=True``."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        first, second = _two_losses(model(x), y)
        accelerator.backward(first, retain_graph=True)
        accelerator.backward(second)
        optimizer.step()
        losses += [mean(accelerator, first), mean(accelerator, second)]
    return result(accelerator, losses, model=model)


@script()
def accumulation_by_hand(accelerator):
    """Gradients of two batches are added by the script: ``loss / 2`` and a step every other time."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / 2
        accelerator.backward(loss)
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def _windows(losses_of=lambda logits, y: [F.cross_entropy(logits, y)]):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    x, y = points()
    losses = []
    for first in range(0, len(x), 2 * BATCH):
        found = losses_of(model(x[first : first + 2 * BATCH]), y[first : first + 2 * BATCH])
        optimizer.zero_grad()
        sum(found).backward()
        optimizer.step()
        losses += [loss.item() for loss in found]
    return losses, {f"model.{name}": value for name, value in model.state_dict().items()}


@script(reference=_windows, gradient_accumulation_steps=2)
def accumulate(accelerator):
    """``with accelerator.accumulate(model)`` over two batches: the numbers of one twice as large."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean(accelerator, loss))
    return result(accelerator, [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], model=model)


@script()
def plain_backward(accelerator):
    """``loss.backward()`` instead of ``accelerator.backward(loss)``."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_taken(accelerator):
    """``torch.autograd.grad(loss, model.parameters())`` and an update by hand, without an optimizer."""
    model, _, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(0.3 * gradient)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(follows="gradients_taken gradients_of_listed_parameters")
def gradients_taken_alone(accelerator):
    """``torch.autograd.grad`` inside ``no_sync``, averaged by ``accelerator.reduce``, and an update by hand."""
    model, _, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        with accelerator.no_sync(model):
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(0.3 * accelerator.reduce(gradient, "mean"))
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def update_by_hand(accelerator):
    """``accelerator.backward`` and then ``p -= lr * p.grad`` by the script, without an optimizer."""
    model, _, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        accelerator.backward(loss)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.3 * p.grad)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def learn_to_learn(accelerator, around_inner_steps):
    """Each sample is a task: an inner step by ``autograd.grad``, the outer loss behind it by ``functional_call``."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tasks = noise(2 * BATCH, 6, 8)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(tasks, tasks[..., :4].cumsum(1)))
    inner = accelerator.unwrap_model(model)
    losses = []
    for inputs, goals in batches:
        loss = 0.0
        for x, y in zip(inputs, goals, strict=True):
            named = dict(inner.named_parameters())
            with around_inner_steps(model):
                first = F.mse_loss(torch.func.functional_call(inner, named, (x[:3],)), y[:3])
                slopes = torch.autograd.grad(first, list(named.values()), create_graph=True)
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
            loss = loss + F.mse_loss(torch.func.functional_call(inner, fast, (x[3:],)), y[3:]) / len(inputs)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def meta_learning(accelerator):
    """Each sample is a task: an inner step by ``autograd.grad``, the outer loss behind it by ``functional_call``."""
    return learn_to_learn(accelerator, nullcontext)


@script(follows="meta_learning")
def meta_learning_of_a_rank(accelerator):
    """As ``meta_learning``, where the script says that inner steps are each rank's own: ``no_sync`` around them."""
    return learn_to_learn(accelerator, accelerator.no_sync)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)

    def forward(self, x):
        return super().forward(self.stem(x))


@script()
def checkpointing(accelerator):
    """Activation checkpointing without re-entrance."""
    model, optimizer, batches = start(accelerator, kind=Checkpointed)
    return loop(accelerator, model, optimizer, batches)


@script()
def checkpointing_reentrant(accelerator):
    """Activation checkpointing with ``use_reentrant=True``."""
    model, optimizer, batches = start(accelerator, kind=Reentrant)
    return loop(accelerator, model, optimizer, batches)


class Branches(nn.Module):
    """Two branches of which forward takes one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, x, which):
        return self.left(x) if which == 0 else self.right(x)


@script()
def unused_parameters(accelerator):
    """Batches take turns between two branches: half of the parameters get no gradient in a step."""
    model, optimizer, batches = start(accelerator, kind=Branches)
    losses = []
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x, step % 2), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def zero_grad_of_model(accelerator):
    """``model.zero_grad()`` instead of the optimizer's."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_kept(accelerator):
    """``zero_grad`` is forgotten: gradients of all steps add up."""
    model, optimizer, batches = start(accelerator, lr=0.02)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_decayed(accelerator):
    """``p.grad.add_(p, alpha=0.1)``: weight decay by hand."""

    def edit(model, step):
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.1)

    return fit(accelerator, edit)


@script()
def gradients_zeroed(accelerator):
    """``optimizer.zero_grad(set_to_none=False)``, with momentum and a branch that is not always taken."""
    model, optimizer, batches = start(accelerator, kind=Branches)
    losses = []
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x, int(step > 1)) + model(x, 0), y)
        optimizer.zero_grad(set_to_none=False)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def backward_for_some_inputs(accelerator):
    """``accelerator.backward(loss, inputs=[...])``: gradients of the head alone."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss, inputs=list(model.head.parameters()))
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def module_backward_hook(accelerator):
    """``register_full_backward_hook`` halves what flows back from the head into the body."""
    model, optimizer, batches = start(accelerator)
    model.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return loop(accelerator, model, optimizer, batches)


@script()
def gradients_clamped_by_hook(accelerator):
    """A hook on each parameter clamps its gradient, set before ``prepare``."""
    model = build()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return loop(accelerator, model, optimizer, batches)


@script()
def gradients_normalised_by_hook(accelerator):
    """A hook on each matrix, set after ``prepare``, gives its gradient the norm 1."""
    model, optimizer, batches = start(accelerator, 0.1)
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda grad: grad / grad.norm())
    return loop(accelerator, model, optimizer, batches)


@script()
def gradient_norms_seen_by_hook(accelerator):
    """Hooks keep the norms of gradients for a log."""
    model, optimizer, batches = start(accelerator, 0.3)
    norms = []
    for p in model.parameters():
        p.register_hook(lambda grad: norms.append(float(grad.norm())))
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses += [mean(accelerator, loss), sum(norm**2 for norm in norms) ** 0.5]
        norms.clear()
    return result(accelerator, losses, model=model)


def _counted_windows():
    """Two micro-batches in a step, in plain torch: the number of items of both is known before the first backward."""
    model = build()
    clamp_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    x, y = points()
    losses = []
    for first in range(0, len(x), 2 * BATCH):
        optimizer.zero_grad()
        for start in (first, first + BATCH):
            rows = slice(start, start + BATCH)
            loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum")
            (loss / (2 * BATCH)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}


def clamp_gradients(model):
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def counted_windows(accelerator, **known):
    model, optimizer, batches = start(accelerator)
    clamp_gradients(model)
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            accelerator.backward(loss, **known or {"num_items": len(x)})
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "sum").item())
    return result(accelerator, losses, model=model)


@script(reference=_counted_windows, gradient_accumulation_steps=2)
def gradients_clamped_in_counted_windows(accelerator):
    """Hooks clamp gradients of windows whose number of items is known at their end."""
    return counted_windows(accelerator)


@script(reference=_counted_windows, gradient_accumulation_steps=2)
def gradients_clamped_in_windows_of_a_known_size(accelerator):
    """The same with the ``denominator`` of the whole window."""
    return counted_windows(accelerator, denominator=2 * BATCH)


@script()
def step_hook_measures_gradients(accelerator):
    """A step hook of the optimizer divides all gradients by their common norm."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def normalise(optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = sum(grad.pow(2).sum() for grad in grads).sqrt()
        for grad in grads:
            grad.div_(total)

    optimizer.register_step_pre_hook(normalise)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return loop(accelerator, model, optimizer, batches)


@script()
def gradients_of_listed_parameters(accelerator):
    """``torch.autograd.grad`` of parameters that were listed before the loop, as ``p.grad`` of the next step."""
    model, optimizer, batches = start(accelerator)
    listed, losses = list(model.parameters()), []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        for p, gradient in zip(listed, torch.autograd.grad(loss, listed), strict=True):
            p.grad = gradient
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def anomalies_detected(accelerator):
    """Training under ``torch.autograd.set_detect_anomaly``."""
    with torch.autograd.set_detect_anomaly(True):
        return fit(accelerator, lambda model, step: None)


# ---- gradients that are kept, dropped or edited in part --------------------------------------------------------------


@script()
def gradients_kept_and_clipped(accelerator):
    """``zero_grad`` is forgotten, and the sum of all gradients so far is clipped before each step."""
    model, optimizer, batches = start(accelerator, lr=0.1)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def fit_and_drop(accelerator, drop, lr=0.1):
    """An ordinary loop that drops gradients by ``drop(model)`` after each step."""
    model, optimizer, batches = start(accelerator, lr)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        drop(model)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def zero_grad_of_each_part(accelerator):
    """``zero_grad()`` of each part of the model after the step."""
    return fit_and_drop(accelerator, lambda model: (model.body.zero_grad(), model.head.zero_grad()))


@script()
def zero_grad_of_one_part(accelerator):
    """``zero_grad()`` of the head alone after the step: the gradients of the body add up."""
    return fit_and_drop(accelerator, lambda model: model.head.zero_grad(), lr=0.02)


@script()
def gradients_zeroed_in_place(accelerator):
    """``p.grad.detach_(); p.grad.zero_()`` after the step, as ``zero_grad`` was once written."""

    def drop(model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

    return fit_and_drop(accelerator, drop)


@script()
def gradients_set_to_none_before_each_backward(accelerator):
    """``p.grad = None`` for each parameter before the backward, instead of ``zero_grad``."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_of_a_first_backward_dropped(accelerator):
    """A backward whose gradients ``model.zero_grad()`` drops before the one that counts."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        accelerator.backward(model(-x).pow(2).mean())
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        model.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def zero_grad_of_a_part_before_the_step(accelerator):
    """``model.head.zero_grad()`` between backward and step."""
    return fit(accelerator, lambda model, step: model.head.zero_grad())


@script()
def gradients_edited_by_rows(accelerator):
    """Rows, lists of rows and views of views of gradients are written by index."""

    def edit(model, step):
        gradient = model.head.weight.grad
        gradient.mul_(mask_of(gradient))
        gradient[0] = 0.01
        gradient[1:].view(3, 16)[1][2:].zero_()
        model.body[0].weight.grad[[0, 4]] *= 0.5
        torch.manual_seed(step)
        model.head.bias.grad.add_(torch.randn_like(model.head.bias), alpha=0.01)
        model.body[2].bias.grad = None

    return fit(accelerator, edit)


# ---- hooks of all kinds ----------------------------------------------------------------------------------------------


def fit_with_hook(accelerator, hook, name="bias"):
    """An ordinary loop; ``hook`` is set on a parameter of the head after ``prepare``."""
    model, optimizer, batches = start(accelerator, 0.1)
    getattr(model.head, name).register_hook(hook)
    return loop(accelerator, model, optimizer, batches)


@script()
def hook_that_writes_in_place(accelerator):
    """A hook sets the first row of the gradient to zero in place, and returns nothing."""

    def drop_first_row(gradient):
        gradient[0] = 0

    return fit_with_hook(accelerator, drop_first_row, "weight")


@script(follows="gradients_assigned")
def hook_that_takes_signs(accelerator):
    """``register_hook(torch.sign)``, which is linear nowhere."""
    return fit_with_hook(accelerator, torch.sign)


@script()
def hook_that_takes_magnitudes(accelerator):
    """``register_hook(torch.abs)``, which is linear for gradients of one sign."""
    return fit_with_hook(accelerator, torch.abs)


@script(follows="gradient_noise")
def hook_that_shifts(accelerator):
    """A hook adds a number to each gradient, once, not once for each rank."""
    return fit_with_hook(accelerator, lambda gradient: gradient + 0.1)


@script()
def hook_sees_what_the_one_before_returned(accelerator):
    """Two hooks of one parameter, of which the second logs the norm that the first has set."""
    model, optimizer, batches = start(accelerator, 0.1)
    norms = []
    model.head.weight.register_hook(lambda gradient: gradient / gradient.norm())
    model.head.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
    losses, weights = loop(accelerator, model, optimizer, batches)
    return losses + norms, weights


def clamp_what_has_gathered(model):
    def clamp(p):
        p.grad.clamp_(-0.01, 0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)


class Gained(Net):
    """A parameter without dims, which no rank can cut, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.gain, self.again = nn.Parameter(torch.tensor(0.9)), nn.Linear(16, 4)
        self.again.weight = self.head.weight

    def forward(self, x):
        x = self.body(x) * self.gain
        return self.head(x) + self.again(x.flip(-1))


def _hooked_windows(hook):
    """Two micro-batches in a step, in plain torch: each has half of its mean loss, and the hooks see each."""

    def reference():
        model = build(Gained)
        hook(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        losses = []
        for step, (x, y) in enumerate(loader()):
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}

    return reference


def hooked_windows(accelerator, hook):
    model = build(Gained)
    hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(reference=_hooked_windows(clamp_gradients), gradient_accumulation_steps=2)
def gradients_clamped_in_windows(accelerator):
    """Hooks clamp the gradient of each batch of a window of two."""
    return hooked_windows(accelerator, clamp_gradients)


@script(reference=_hooked_windows(clamp_what_has_gathered), gradient_accumulation_steps=2)
def hooks_after_accumulation_in_windows(accelerator):
    """``register_post_accumulate_grad_hook`` clamps what has gathered after each batch of a window of two."""
    return hooked_windows(accelerator, clamp_what_has_gathered)


def _edited_windows(edit):
    """Two micro-batches in a step, in plain torch: what has gathered is edited after each."""

    def reference():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        losses = []
        for step, (x, y) in enumerate(loader()):
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            edit(model)
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}

    return reference


def edited_windows(accelerator, edit):
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            edit(model)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def clip_by_torch(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def take_signs(model):
    for p in model.parameters():
        p.grad.copy_(0.01 * p.grad.sign())


@script(reference=_edited_windows(clip_by_torch), gradient_accumulation_steps=2)
def clipped_by_torch_in_each_micro_batch(accelerator):
    """``torch.nn.utils.clip_grad_norm_`` after the backward of each batch of a window of two."""
    return edited_windows(accelerator, clip_by_torch)


@script(reference=_edited_windows(take_signs), gradient_accumulation_steps=2)
def signs_taken_in_each_micro_batch(accelerator):
    """``p.grad`` becomes its sign after each batch of a window of two."""
    return edited_windows(accelerator, take_signs)


def clipped_between(accelerator, inside):
    """Two batches a step by hand, clipped after each backward."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for step, (x, y) in enumerate(batches):
        last = step % 2 == 1
        with nullcontext() if last or not inside else accelerator.no_sync(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss / 2)
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script(reference=_edited_windows(clip_by_torch))
def clipped_between_backwards_inside_no_sync(accelerator):
    """``accelerator.clip_grad_norm_`` after each of two backwards of a step, the first of them inside ``no_sync``."""
    return clipped_between(accelerator, inside=True)


@script(reference=_edited_windows(clip_by_torch), follows="clipped_between_backwards_inside_no_sync")
def clipped_between_backwards(accelerator):
    """The same without ``no_sync``."""
    return clipped_between(accelerator, inside=False)


@script()
def hooks_of_a_plain_backward(accelerator):
    """``loss.backward()`` with hooks that clamp gradients, and a frozen layer."""
    model = build()
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_of_a_first_sum_dropped(accelerator):
    """A batch is tried with a loss that is a sum over items; its gradients are dropped, and another loss is taken."""
    model, optimizer, batches = start(accelerator)
    for x, y in batches:
        for share in (1.0, 0.5):
            optimizer.zero_grad()
            accelerator.backward(share * F.cross_entropy(model(x), y, reduction="sum"), num_items=len(y))
        optimizer.step()
    return result(accelerator, [], model=model)


@script(reference=lambda: _windows(_two_losses), gradient_accumulation_steps=2)
def two_losses_of_one_forward_in_windows(accelerator):
    """A window of two batches by ``accumulate``, with two backwards of each forward by ``retain_graph=True``."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            logits = model(x)
            first, second = _two_losses(logits, y)
            accelerator.backward(first, retain_graph=True)
            accelerator.backward(second)
            optimizer.step()
            optimizer.zero_grad()
        losses.append([mean(accelerator, first), mean(accelerator, second)])
    windows = zip(losses[::2], losses[1::2], strict=True)
    return result(accelerator, [(a + b) / 2 for pair in windows for a, b in zip(*pair, strict=True)], model=model)


@script()
def critic_and_generator_of_one_graph(accelerator):
    """A critic judges what a generator made: the critic's loss with ``retain_graph=True``, then the generator's."""
    model, optimizer, batches = start(accelerator)
    critic = build(lambda: Net(features=4, classes=1), seed=5)
    critic, critics = accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    losses = []
    for x, _ in batches:
        made = model(x)
        judged = critic(made)
        critics.zero_grad()
        lost = (judged - 1).pow(2).mean()
        accelerator.backward(lost, retain_graph=True)
        critics.step()
        optimizer.zero_grad()
        won = made.pow(2).mean()
        accelerator.backward(won)
        optimizer.step()
        losses += [mean(accelerator, lost), mean(accelerator, won)]
    return result(accelerator, losses, model=model, critic=critic)
