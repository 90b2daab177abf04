"""What people write around the loop: pruning, parametrizations, schedules, closed-form updates of state."""

from __future__ import annotations

import copy
import math

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune


def sgd(model, lr=0.3):
    return torch.optim.SGD(model.parameters(), lr=lr)


def fit(accelerator, model, optimizer, batches, after=lambda step: None, loss_of=None, epochs=2):
    """The ordinary loop; ``after(step)`` comes after each step."""
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y) if loss_of is None else loss_of(model, x, y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
            after(len(losses))
    return result(accelerator, losses, model=model)


@script()
def pruned_before_prepare(accelerator):
    """Half of a layer's weights is pruned by ``torch.nn.utils.prune``, then all is prepared."""
    model = build()
    prune.l1_unstructured(model.body[0], "weight", amount=0.5)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches)


@script()
def pruned_midway(accelerator):
    """``prune.l1_unstructured`` in the loop, made permanent after training."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def after(step):
        if step == 3:
            prune.l1_unstructured(accelerator.unwrap_model(model).body[0], "weight", amount=0.5)

    return fit(accelerator, model, optimizer, batches, after)


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.T) / 2


@script()
def parametrized_after_prepare(accelerator):
    """``parametrize.register_parametrization`` on a layer of the prepared model."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    parametrize.register_parametrization(accelerator.unwrap_model(model).body[2], "weight", Symmetric())
    return fit(accelerator, model, optimizer, batches)


@script()
def total_norm_then_clip(accelerator):
    """``get_total_norm`` and ``clip_grads_with_norm_`` of torch, one after the other."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()
        losses += [mean(accelerator, loss), float(norm)]
    return result(accelerator, losses, model=model)


@script()
def cosine_by_hand(accelerator):
    """Warm-up and cosine by ``LambdaLR``, whose state goes into a new one midway."""
    model = build()

    def rate(step):
        return min(step / 2, 0.5 * (1 + math.cos(math.pi * step / 8)))

    optimizer = sgd(model, 0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    found = [scheduler]

    def after(step):
        found[0].step()
        if step == 4:
            found[0].load_state_dict(copy.deepcopy(found[0].state_dict()))

    return fit(accelerator, model, optimizer, batches, after)


@script()
def schedules_chained(accelerator):
    """``SequentialLR`` of a linear warm-up and an exponential decay."""
    model = build()
    optimizer = sgd(model, 0.5)
    schedulers = torch.optim.lr_scheduler
    scheduler = schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.2, total_iters=3), schedulers.ExponentialLR(optimizer, 0.8)],
        milestones=[3],
    )
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    return fit(accelerator, model, optimizer, batches, lambda step: scheduler.step())


@script()
def decay_groups_by_name(accelerator):
    """Weight decay for matrices alone, in groups that are built after the model was prepared."""
    model, batches = accelerator.prepare(build(), loader())
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    return fit(accelerator, model, accelerator.prepare(optimizer), batches)


@script()
def optimizer_swapped(accelerator):
    """Adam for the first steps, then SGD of the same parameters."""
    model = build()
    first, second = torch.optim.Adam(model.parameters(), lr=0.01), sgd(model)
    model, first, second, batches = accelerator.prepare(model, first, second, loader())
    losses = []
    for epoch in range(2):
        optimizer = second if epoch else first
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def hessian_vector_penalty(accelerator):
    """The norm of the gradient of each step as a penalty, by ``create_graph=True``."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model, 0.1), loader())

    def loss_of(model, x, y):
        loss = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    return fit(accelerator, model, optimizer, batches, loss_of=loss_of, epochs=1)


@script()
def gradients_per_sample(accelerator):
    """``torch.func.vmap`` of ``grad``: gradients of each sample, clipped and averaged, as DP-SGD does."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    losses = []
    for x, y in batches:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(parameters, x, y):
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        norm = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        share = (0.5 / norm).clamp(max=1)
        for name, p in model.named_parameters():
            p.grad = accelerator.reduce((each[name] * share.view(-1, *[1] * p.dim())).mean(0), "mean")
        optimizer.step()
        losses.append(mean(accelerator, norm.mean()))
    return result(accelerator, losses, model=model)


class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, CLASSES, cutoffs=[1, 2])

    def forward(self, x, y):
        return self.head(self.body(x), y).loss


@script()
def adaptive_softmax(accelerator):
    """``nn.AdaptiveLogSoftmaxWithLoss``, whose rare clusters some batches never reach."""
    model = build(Adaptive)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches, loss_of=lambda model, x, y: model(x, y))


class Centres(Net):
    """Keeps a running mean of each class's features, and draws features towards it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(CLASSES, 16))

    def forward(self, x, y):
        found = self.body(x)
        if self.training:
            with torch.no_grad():
                for c in range(CLASSES):
                    if (y == c).any():
                        self.centres[c].lerp_(found[y == c].mean(0), 0.1)
        return F.cross_entropy(self.head(found), y) + 0.1 * (found - self.centres[y]).square().sum(1).mean()


@script(whole_batch="the mean of a class is taken over the samples that one process sees")
def centre_loss(accelerator):
    """A buffer in forward follows the mean of each class's features."""
    model = build(Centres)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches, loss_of=lambda model, x, y: model(x, y))


class Routed(nn.Module):
    """Samples of each task go to a head of their own; some batches have none of a task."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"low": nn.Linear(16, CLASSES), "high": nn.Linear(16, CLASSES)})

    def forward(self, x, high):
        found, output = self.body(x), x.new_zeros(len(x), CLASSES)
        for name, chosen in (("low", ~high), ("high", high)):
            if chosen.any():
                output = output.index_put((chosen.nonzero()[:, 0],), self.heads[name](found[chosen]))
        return output


@script()
def routed_by_task(accelerator):
    """``nn.ModuleDict``: a head runs where a batch has samples of its task, so not on each process."""
    model = build(Routed)
    x, y = points()
    high = torch.arange(len(x)) % BATCH >= BATCH - 2
    optimizer = sgd(model)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, high, y))
    losses = []
    for x, high, y in batches:
        loss = F.cross_entropy(model(x, high), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def listed_before_prepare(accelerator):
    """Parameters that were listed before ``prepare`` are clamped after each step."""
    model = build()
    listed = list(model.parameters())
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def after(step):
        with torch.no_grad():
            for p in listed:
                p.clamp_(-0.2, 0.2)

    return fit(accelerator, model, optimizer, batches, after)


@script()
def clips_what_was_listed_before_prepare(accelerator):
    """``params_to_clip`` is made beside the optimizer, before ``prepare``, as in recipes for diffusion models."""
    model = build()
    listed = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(listed, lr=0.5)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        norms.append(float(accelerator.clip_grad_norm_(listed, 0.1)))
        optimizer.step()
    return result(accelerator, norms, model=model)


class ClampsLater(Net):
    """From its sixth forward on it clamps its head."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += self.training
        if self.count > 5:
            self.head.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@script()
def clamped_by_later_forwards(accelerator):
    """A forward that begins to clamp a layer's weight after some steps, through ``data``."""
    model = build(ClampsLater)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches, epochs=3)


@script()
def decayed_by_attributes_of_parameters(accelerator):
    """``p.no_decay`` is set before ``prepare``; the loop asks ``getattr(p, "no_decay", False)`` after each step."""
    model = build()
    for name, p in model.named_parameters():
        p.no_decay = "bias" in name
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    @torch.no_grad()
    def after(step):
        for p in model.parameters():
            if not getattr(p, "no_decay", False):
                p.mul_(0.9)

    return fit(accelerator, model, optimizer, batches, after)


@script()
def groups_by_attributes_after_prepare(accelerator):
    """The optimizer is made after ``prepare``, in groups by an attribute that parameters were given before it."""
    model = build()
    for p in model.body.parameters():
        p.optimizer_settings = {"lr": 0.05}
    model, batches = accelerator.prepare(model, loader())
    slow = [p for p in model.parameters() if hasattr(p, "optimizer_settings")]
    rest = [p for p in model.parameters() if not hasattr(p, "optimizer_settings")]
    optimizer = torch.optim.SGD(rest, lr=0.3)
    optimizer.add_param_group({"params": slow, **slow[0].optimizer_settings})
    return fit(accelerator, model, accelerator.prepare(optimizer), batches)


class ActNorm(Net):
    """Its first forward sets a shift and a scale from the batch, as in Glow."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(FEATURES)), nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
            self.ready.fill_(True)
        return super().forward((x + self.shift) * self.scale)


@script()
def initialised_by_a_forward_without_gradients(accelerator):
    """After ``prepare`` one forward under ``no_grad``, of a batch that all processes have, initialises parameters."""
    model = build(ActNorm)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    with torch.no_grad():
        model(points()[0][:BATCH])
    return fit(accelerator, model, optimizer, batches)


@script(follows="initialised_by_a_forward_without_gradients")
def initialised_by_a_forward_before_prepare(accelerator):
    """One forward under ``no_grad`` initialises parameters before ``prepare``, as the refusal of the other advises."""
    model = build(ActNorm)
    with torch.no_grad():
        model(points()[0][:BATCH])
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches)


@script()
def penalty_by_attributes_of_parameters(accelerator):
    """A penalty on weights, each by an attribute of its own, is added between forward and backward."""
    model = build()
    for name, p in model.named_parameters():
        p.penalty = 0.1 if "weight" in name else 0.0
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def loss_of(model, x, y):
        penalty = sum(getattr(p, "penalty", 1.0) * p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + penalty

    return fit(accelerator, model, optimizer, batches, loss_of=loss_of)


class ScaledByAttributes(Net):
    """Each layer multiplies by an attribute of its weight."""

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
            x = x * getattr(layer.weight, "gain", 1.0) if isinstance(layer, nn.Linear) else x
        return self.head(x) * getattr(self.head.weight, "gain", 1.0)


@script()
def attributes_read_in_forward(accelerator):
    """A forward reads attributes of its weights, which were set before ``prepare``."""
    model = build(ScaledByAttributes)
    model.head.weight.gain, model.body[0].weight.gain = 0.5, 2.0
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches)


@script()
def gradients_left_before_prepare(accelerator):
    """A backward before ``prepare`` leaves gradients, to which the first step's are added."""
    model = build()
    x, y = points()
    F.cross_entropy(model(x), y).backward()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return result(accelerator, [], model=model)


@script()
def gradients_left_before_prepare_and_zeroed(accelerator):
    """A backward before ``prepare`` tries the model; ``zero_grad()`` comes before each backward, as usual."""
    model = build()
    x, y = points()
    F.cross_entropy(model(x), y).backward()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(accelerator, model, optimizer, batches)


class Counts(Net):
    """Keeps a number beside its weights, by torch's own way."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@script()
def extra_state_beside_weights(accelerator):
    """A module with ``get_extra_state`` and ``set_extra_state``; its whole state is gathered and loaded again."""
    model = build(Counts)
    model.seen = 7
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    again = build(Counts, seed=5)
    if accelerator.is_main_process:
        again.load_state_dict(state)
        assert again.seen == 7, again.seen
    weights = {f"model.{name}": value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return [], weights


@script()
def metrics_of_a_column_with_a_short_end(accelerator):
    """``gather_for_metrics((scores[:, 0], labels))``; the last batch has one row for each of two processes."""
    model = build()
    batches = loader(*(each[:38] for each in points()))
    model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    scores = []
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            column, labels = accelerator.gather_for_metrics((model(x)[:, 0], y))
            scores.append((column * labels).sum().item())
    return result(accelerator, scores, model=model)
