"""Optimizers, learning rates and schedules."""

from __future__ import annotations

import copy

import torch
from parity_common import BATCH, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F


def fit(accelerator, model, optimizer, *, epochs=1, after=None):
    """The ordinary loop; ``after(step, loss)`` follows each step."""
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
            if after is not None:
                after(optimizer, len(losses), losses[-1])
    return result(accelerator, losses, model=model)


@script()
def sgd_nesterov(accelerator):
    """SGD with Nesterov momentum and weight decay."""
    model = build()
    return fit(
        accelerator, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    )


@script()
def adamw(accelerator):
    """AdamW, biases without weight decay: two parameter groups."""
    model = build()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return fit(accelerator, model, torch.optim.AdamW(groups, lr=0.01))


@script()
def adagrad(accelerator):
    """Adagrad, which fills its state when it is made; its rate decays, and the head has another one."""
    model = build()
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.2, lr_decay=0.1)
    return fit(accelerator, model, optimizer)


@script()
def adafactor(accelerator):
    """Adafactor: factored second moments, and updates clipped by the norm of a whole matrix."""
    model = build()
    return fit(accelerator, model, torch.optim.Adafactor(model.parameters(), lr=0.05))


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        first, middle, last = (nn.Linear(*sizes, bias=False) for sizes in ((8, 16), (16, 16), (16, 4)))
        self.layers = nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)

    def forward(self, x):
        return self.layers(x)


@script()
def muon(accelerator):
    """Muon on a model of matrices: each update is orthogonalised as a whole."""
    model = build(Matrices)
    return fit(accelerator, model, torch.optim.Muon(model.parameters(), lr=0.05))


@script()
def lbfgs(accelerator):
    """LBFGS, whose step takes a closure and calls it several times."""
    losses = []

    def loss_of(logits, y):
        loss = F.cross_entropy(logits, y)
        accelerator.backward(loss)
        losses.append(mean(accelerator, loss))
        return loss

    return by_closure(accelerator, loader(), loss_of, losses, max_iter=3)


def by_closure(accelerator, batches, loss_of, losses=(), **settings):
    """Steps of LBFGS; ``loss_of`` goes backward and returns what the optimizer compares."""
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, **settings)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            return loss_of(model(x), y)

        optimizer.step(closure)
    return result(accelerator, list(losses), model=model)


@script()
def line_search_over_a_short_batch(accelerator):
    """LBFGS looks for the length of each step by the losses that its closure returns; the last batch is short."""

    def loss_of(logits, y):
        loss = F.cross_entropy(logits, y)
        accelerator.backward(loss)
        return loss

    batches = loader(*points(4 * BATCH - 5))
    return by_closure(accelerator, batches, loss_of, max_iter=4, line_search_fn="strong_wolfe")


@script()
def line_search_by_items(accelerator):
    """LBFGS goes backward by sums over items, several times in each step, and compares their means."""

    def loss_of(logits, y):
        loss = F.cross_entropy(logits, y, reduction="sum")
        accelerator.backward(loss, num_items=len(y))
        return loss / len(y)

    batches = loader(*points(4 * BATCH - 5))
    return by_closure(accelerator, batches, loss_of, max_iter=4, line_search_fn="strong_wolfe")


class SignDescent(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.5)
                p.sub_(average.tanh() * group["lr"])


@script()
def custom_optimizer(accelerator):
    """An optimizer class of the script's own, element by element."""
    model = build()
    return fit(accelerator, model, SignDescent(model.parameters(), lr=0.05))


class NormedDescent(torch.optim.Optimizer):
    """Divides each gradient by its norm, and scales by the norm of the parameter (as LARS does)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() + 1e-6) * p.norm().clamp(min=0.1) * group["lr"])


@script()
def layerwise_optimizer(accelerator):
    """An optimizer class of the script's own that takes norms of whole layers."""
    model = build()
    return fit(accelerator, model, NormedDescent(model.parameters(), lr=0.05))


class GlobalDescent(torch.optim.Optimizer):
    """Divides all gradients by their common norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.pow(2).sum() for p in parameters]).sum().sqrt()
        for p in parameters:
            p.sub_(p.grad / norm * self.param_groups[0]["lr"])


@script()
def global_norm_optimizer(accelerator):
    """An optimizer class of the script's own that takes one norm over all parameters."""
    model = build()
    return fit(accelerator, model, GlobalDescent(model.parameters(), lr=0.2))


@script()
def rates_by_layer(accelerator):
    """Learning rates that fall from the head to the first layer."""
    model = build()
    groups = [{"params": module.parameters(), "lr": lr} for module, lr in ((model.body, 0.05), (model.head, 0.5))]
    return fit(accelerator, model, torch.optim.SGD(groups, lr=0.1))


@script()
def rate_by_hand(accelerator):
    """``param_group["lr"] = ...`` before each step: a schedule of the script's own."""
    model = build()

    def after(optimizer, step, loss):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / (1 + step)

    return fit(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), after=after)


@script()
def one_cycle(accelerator):
    """A prepared OneCycleLR, which moves the momentum too."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses = []
    for _ in range(2):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if len(losses) < 7:
                scheduler.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def scheduler_never_prepared(accelerator):
    """A scheduler that the script steps itself, made of the prepared optimizer."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def plateau(accelerator):
    """ReduceLROnPlateau, fed with a loss that all processes share."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for _ in range(2):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
            scheduler.step(losses[-1])
    return result(accelerator, losses, model=model)


@script()
def optimizer_never_prepared(accelerator):
    """The optimizer is not passed to ``prepare``."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, batches = accelerator.prepare(model, loader())
    return loop(accelerator, model, optimizer, batches)


@script()
def optimizer_made_after(accelerator):
    """The optimizer is made of the prepared model's parameters and never prepared."""
    model, batches = accelerator.prepare(build(), loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return loop(accelerator, model, optimizer, batches)


@script()
def optimizer_prepared_after(accelerator):
    """The optimizer is made of the prepared model's parameters and prepared then."""
    model, batches = accelerator.prepare(build(), loader())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    return loop(accelerator, model, optimizer, batches)


@script()
def own_optimizer_object(accelerator):
    """The script steps its own optimizer object and ignores what ``prepare`` returned for it."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, _, batches = accelerator.prepare(model, optimizer, loader())
    return loop(accelerator, model, optimizer, batches)


def loop(accelerator, model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def two_optimizers(accelerator):
    """One model, an optimizer for its body and another for its head."""
    model = build()
    slow, fast = torch.optim.SGD(model.body.parameters(), lr=0.05), torch.optim.Adam(model.head.parameters(), lr=0.02)
    model, slow, fast, batches = accelerator.prepare(model, slow, fast, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        slow.zero_grad()
        fast.zero_grad()
        accelerator.backward(loss)
        slow.step()
        fast.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def one_optimizer_of_two_models(accelerator):
    """An encoder and a decoder, prepared as two models, and one optimizer over both."""
    encoder, decoder = build(lambda: nn.Linear(8, 16)), build(lambda: nn.Linear(16, 4), seed=2)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.3)
    encoder, decoder, optimizer, batches = accelerator.prepare(encoder, decoder, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(decoder(torch.tanh(encoder(x))), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, encoder=encoder, decoder=decoder)


@script()
def sharpness_aware(accelerator):
    """Sharpness-aware minimisation by hand: climb by ``p.add_``, take gradients there, come back, step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        climbs = []
        with torch.no_grad():
            for p in model.parameters():
                climbs.append(0.05 * p.grad)
                p.add_(climbs[-1])
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.sub_(climb)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def penalties(accelerator):
    """L1 and L2 penalties, computed from ``model.parameters()``, are part of the loss."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        loss = loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def _penalized(accelerator, loss_of):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = loss_of(model, optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def penalty_before_the_forward(accelerator):
    """An L2 penalty over the optimizer's groups is computed first, and the loss of the batch added to it in place."""

    def loss_of(model, optimizer, of_batch):
        total = sum(1e-2 * p.pow(2).sum() for group in optimizer.param_groups for p in group["params"])
        total += of_batch()
        return total

    return _penalized(accelerator, loss_of)


@script()
def penalty_on_one_vector_before_the_forward(accelerator):
    """The loss of the batch is stacked with a penalty on all weights as one vector, which has another layout."""

    def loss_of(model, optimizer, of_batch):
        penalty = 1e-2 * torch.cat([p.reshape(-1) for p in model.parameters()]).norm(1)
        return torch.stack([of_batch(), penalty]).sum()

    return _penalized(accelerator, loss_of)


@script()
def penalty_scaled_by_the_loss(accelerator):
    """A penalty, computed before the forward, is multiplied by the detached loss, another number on every rank."""

    def loss_of(model, optimizer, of_batch):
        penalty = 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        loss = of_batch()
        return loss + loss.detach() * penalty

    return _penalized(accelerator, loss_of)


@script()
def optimizer_state_reset(accelerator):
    """Adam's moments are set to zero in the loop, by ``optimizer.state``."""
    model = build()

    def after(optimizer, step, loss):
        if step == 2:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    return fit(accelerator, model, torch.optim.Adam(model.parameters(), lr=0.02), after=after)


@script()
def optimizer_state_restored(accelerator):
    """``optimizer.state_dict()`` is kept (copied) in the loop and loaded back two steps later."""
    model = build()
    kept = []

    def after(optimizer, step, loss):
        if step == 2:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if step == 4:
            optimizer.load_state_dict(kept[0])

    return fit(accelerator, model, torch.optim.Adam(model.parameters(), lr=0.02), after=after, epochs=2)


def body_and_head():
    model = build()
    groups = [{"params": list(model.body.parameters())}, {"params": list(model.head.parameters()), "lr": 0.1}]
    return model, torch.optim.SGD(groups, lr=0.3)


@script()
def group_taken_out(accelerator):
    """``del optimizer.param_groups[0]`` in the loop: the body is trained no more."""

    def after(optimizer, step, loss):
        if step == 2:
            del optimizer.param_groups[0]

    return fit(accelerator, *body_and_head(), after=after)


@script()
def clipped_by_groups(accelerator):
    """``torch.nn.utils.clip_grad_value_`` of what each group of the optimizer holds."""
    model, optimizer, batches = accelerator.prepare(*body_and_head(), loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.02)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class SharpnessAware(torch.optim.Optimizer):
    """Climbs and comes back in one ``step(closure)``."""

    def __init__(self, params, lr, reach):
        super().__init__(params, {"lr": lr, "reach": reach})

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss, climbs = closure(), []
        for group in self.param_groups:
            for p in group["params"]:
                climbs.append((p, group["lr"], group["reach"] * p.grad))
                p.add_(climbs[-1][2])
        closure()
        for p, lr, climb in climbs:
            p.sub_(climb).sub_(lr * p.grad)
        return loss


@script()
def sharpness_aware_closure(accelerator):
    """Sharpness-aware minimisation as an optimizer whose ``step(closure)`` runs forward and backward twice."""
    model = build()
    optimizer = SharpnessAware(model.parameters(), lr=0.3, reach=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for batch in batches:

        def closure(batch=batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            return loss

        losses.append(mean(accelerator, optimizer.step(closure)))
    return result(accelerator, losses, model=model)
