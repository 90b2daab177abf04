"""What scripts do to gradients, optimizers and weights around a step, and tensors that belong to no model."""

from __future__ import annotations

import copy

import torch
from parity_common import CLASSES, FEATURES, Net, build, loader, mean, result, script
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules


def sgd(model, lr=0.3, **more):
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def start(accelerator, kind=Net, lr=0.3, data=None, **more):
    model = build(kind)
    return accelerator.prepare(model, sgd(model, lr, **more), loader() if data is None else data)


def fit(accelerator, model, optimizer, batches, epochs=1, after=lambda step: None, edit=None):
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            if edit is not None:
                edit()
            optimizer.step()
            losses.append(mean(accelerator, loss))
            after(len(losses))
    return result(accelerator, losses, model=model)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.first, self.second = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x):
        found = self.body(x)
        return self.first(found), self.second(found)


@script()
def gradients_centralised(accelerator):
    """The mean over inputs is taken from each matrix's gradient before the step."""
    model, optimizer, batches = start(accelerator)

    def edit():
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad -= p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True)

    return fit(accelerator, model, optimizer, batches, edit=edit)


@script()
def own_grad_scaler(accelerator):
    """A ``torch.amp.GradScaler`` of the script's own: ``scale``, ``unscale_``, ``step``, ``update``."""
    model, optimizer, batches = start(accelerator)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def hooks_of_optimizers(accelerator):
    """``register_step_pre_hook`` scales gradients and ``register_step_post_hook`` clamps weights, set before."""
    model = build()
    optimizer = sgd(model)

    def before(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def behind(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(behind)
    return fit(accelerator, *accelerator.prepare(model, optimizer, loader()))


@script()
def optimizer_in_backward(accelerator):
    """An optimizer for each parameter, stepped by a hook in backward (torch's recipe to save memory)."""
    model, batches = accelerator.prepare(build(), loader())
    optimizers = {p: torch.optim.SGD([p], lr=0.3, foreach=False) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def closure_of_sgd(accelerator):
    """``loss = optimizer.step(closure)`` with SGD."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            return loss

        losses.append(mean(accelerator, optimizer.step(closure)))
    return result(accelerator, losses, model=model)


@script()
def group_settings_edited(accelerator):
    """``weight_decay``, ``momentum`` and ``betas`` of parameter groups are edited in the loop."""
    model = build()
    optimizer = torch.optim.AdamW(
        [{"params": model.body.parameters()}, {"params": model.head.parameters(), "weight_decay": 0.0}], lr=0.02
    )
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())

    def after(step):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        optimizer.param_groups[1]["lr"] *= 0.5

    return fit(accelerator, model, optimizer, batches, after=after, epochs=2)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer, as it is published."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure=None):
        self.first_step()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.second_step()


@script()
def sam_in_two_steps(accelerator):
    """The published class SAM, by ``first_step`` and ``second_step``."""
    model = build()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.first_step()
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.second_step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def loose_loss_weights(accelerator):
    """Weights of two losses are a tensor of the script, held by the model's optimizer."""
    model = build(TwoHeads)
    weights = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [weights], "lr": 0.05}], lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        logits, value = model(x)
        both = torch.stack([F.cross_entropy(logits, y), (value[:, 0] - x[:, 0]).pow(2).mean()])
        loss = (both * (-weights).exp() + weights).sum()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    losses, found = result(accelerator, losses, model=model)
    return losses, found | {"weights": weights.detach().clone()}


@script()
def temperature_not_prepared(accelerator):
    """Soft actor-critic: the temperature is a tensor of the script with an optimizer of its own."""
    model = build()
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizer, other = sgd(model), torch.optim.SGD([log_alpha], lr=0.5)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        logits = model(x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        loss = F.cross_entropy(logits, y) - (log_alpha.exp().detach() * entropy).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        second = (log_alpha.exp() * (entropy.detach() - x[:, 0])).mean()
        other.zero_grad()
        accelerator.backward(second)
        other.step()
        losses += [mean(accelerator, loss), mean(accelerator, second)]
    losses, found = result(accelerator, losses, model=model)
    return losses, found | {"alpha": log_alpha.detach().clone()}


@script()
def perturbation_by_hand(accelerator):
    """An input perturbation is optimised by hand against a frozen model that is prepared."""
    model = build().requires_grad_(False)
    delta = torch.zeros(FEATURES, requires_grad=True)
    model, batches = accelerator.prepare(model, loader())
    losses = []
    for x, y in batches:
        loss = -F.cross_entropy(model(x + delta), y)
        accelerator.backward(loss)
        with torch.no_grad():
            delta -= 1.0 * delta.grad
            delta.grad = None
        losses.append(mean(accelerator, loss))
    return losses, {"delta": delta.detach().clone()}


@script()
def soft_update_by_state_dict(accelerator):
    """A target network, prepared too, is moved by ``target.state_dict()[key].copy_(...)``."""
    model = build()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    model, target, optimizer, batches = accelerator.prepare(model, target, optimizer, loader())
    losses = []
    for x, y in batches:
        with torch.no_grad():
            goal = target(x)
        loss = F.cross_entropy(model(x), y) + 0.1 * F.mse_loss(model(x), goal)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        mine, others = target.state_dict(), model.state_dict()
        for key in mine:
            mine[key].copy_(0.9 * mine[key] + 0.1 * others[key])
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model, target=target)


@script()
def weights_projected(accelerator):
    """A square matrix is projected onto the orthogonal ones by its SVD after each step; another is renormed."""
    model, optimizer, batches = start(accelerator)

    def after(step):
        with torch.no_grad():
            u, _, v = torch.linalg.svd(model.body[2].weight)
            model.body[2].weight.copy_(u @ v)
            model.head.weight.renorm_(2, 0, 0.5)

    return fit(accelerator, model, optimizer, batches, after=after)


@script()
def parameters_reset(accelerator):
    """``module.reset_parameters()`` of each layer between epochs, with a seed (k-fold training)."""
    model, optimizer, batches = start(accelerator)
    losses, _ = fit(accelerator, model, optimizer, batches)
    torch.manual_seed(6)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    more, weights = fit(accelerator, model, optimizer, batches)
    return losses + more, weights


@script()
def weights_logged(accelerator):
    """Norms, single elements, histograms and lists of weights and gradients are logged."""
    model, optimizer, batches = start(accelerator)
    seen = []

    def edit():
        seen.append(float(model.head.weight.detach().norm()))
        seen.append(model.head.weight[1, 2].item())
        seen.append(model.head.bias.tolist()[3])
        seen.append(float(model.body[0].weight.grad.abs().max()))
        seen.append(float(torch.histc(model.body[0].weight.detach(), 4, -1, 1)[1]))
        seen.append(float(model.body[2].weight.detach().numpy().std()))
        seen.append(float(sum(p.numel() for p in model.parameters())))

    losses, weights = fit(accelerator, model, optimizer, batches, edit=edit)
    return losses + seen, weights


@script()
def ema_foreach(accelerator):
    """``torch._foreach_lerp_`` moves the average, ``torch._foreach_copy_`` copies it into the model at the end."""
    model, optimizer, batches = start(accelerator)
    parameters = [p.data for p in model.parameters()]
    shadow = [p.clone() for p in parameters]
    losses, _ = fit(
        accelerator, model, optimizer, batches, after=lambda step: torch._foreach_lerp_(shadow, parameters, 0.5)
    )
    torch._foreach_copy_(parameters, shadow)
    return result(accelerator, losses, model=model)


def scheduled(accelerator, make, lr=0.5, epochs=2, groups=None, step=lambda scheduler, count: scheduler.step(), **more):
    model = build()
    optimizer = torch.optim.SGD(model.parameters() if groups is None else groups(model), lr=lr, **more)
    scheduler = make(optimizer)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    return fit(accelerator, model, optimizer, batches, epochs, after=lambda count: step(scheduler, count))


@script()
def warm_restarts(accelerator):
    """``CosineAnnealingWarmRestarts``, stepped with fractions of an epoch."""
    return scheduled(
        accelerator, lambda o: schedules.CosineAnnealingWarmRestarts(o, 1, T_mult=2), step=lambda s, n: s.step(n / 4)
    )


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def forward(self):
        return self.log_alpha.exp()


@script()
def temperature_in_a_module(accelerator):
    """The same in a module, whose forward computes with it, prepared with its optimizer."""
    model, holder = build(), Temperature()
    optimizer, other = sgd(model), torch.optim.SGD(holder.parameters(), lr=0.5)
    model, holder, optimizer, other, batches = accelerator.prepare(model, holder, optimizer, other, loader())
    losses = []
    for x, y in batches:
        logits = model(x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        loss = F.cross_entropy(logits, y) - (holder().detach() * entropy).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        second = (holder() * (entropy.detach() - x[:, 0])).mean()
        other.zero_grad()
        accelerator.backward(second)
        other.step()
        losses += [mean(accelerator, loss), mean(accelerator, second)]
    return result(accelerator, losses, model=model, holder=holder)


@script()
def descent_by_hand(accelerator):
    """Gradient descent by hand, of a model without an optimizer."""
    model, batches = accelerator.prepare(build(), loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.3 * p.grad)
                p.grad = None
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def data_between_forward_and_backward(accelerator):
    """p.data = ... of a graph that is alive."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for p in model.parameters():
            p.data = p.data * 1.0
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)
