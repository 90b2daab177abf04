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


@script()
def clip_grad_norm(accelerator):
    """``accelerator.clip_grad_norm_``; the norm is logged."""
    norms = []

    def edit(model, step):
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))

    losses, weights = fit(accelerator, edit)
    return losses + norms, weights


@script()
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
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def hook_after_prepare(accelerator):
    """``p.register_hook`` after ``prepare`` masks half of a layer's gradients."""
    mask = mask_of(build().head.weight)
    model, optimizer, batches = start(accelerator)
    model.head.weight.register_hook(lambda grad: grad * mask)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def hook_after_accumulate(accelerator):
    """``p.register_post_accumulate_grad_hook`` after ``prepare`` halves one layer's gradients."""
    model, optimizer, batches = start(accelerator)

    def halve(p):
        p.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(halve)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


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


@script()
def two_losses_of_one_forward(accelerator):
    """One forward, two backwards through it with ``retain_graph=True``."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
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


def _windows():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    x, y = points()
    losses = []
    for first in range(0, len(x), 2 * BATCH):
        loss = F.cross_entropy(model(x[first : first + 2 * BATCH]), y[first : first + 2 * BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
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


@script()
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


@script()
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
    return _simple(accelerator, model, optimizer, batches)


@script()
def checkpointing_reentrant(accelerator):
    """Activation checkpointing with ``use_reentrant=True``."""
    model, optimizer, batches = start(accelerator, kind=Reentrant)
    return _simple(accelerator, model, optimizer, batches)


def _simple(accelerator, model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


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
    return _simple(accelerator, model, optimizer, batches)


@script()
def gradients_clamped_by_hook(accelerator):
    """A hook on each parameter clamps its gradient, set before ``prepare``."""
    model = build()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradients_normalised_by_hook(accelerator):
    """A hook on each matrix, set after ``prepare``, gives its gradient the norm 1."""
    model, optimizer, batches = start(accelerator, 0.1)
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda grad: grad / grad.norm())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


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
    return _simple(accelerator, model, optimizer, batches)


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
