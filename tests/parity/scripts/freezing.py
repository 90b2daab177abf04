"""Parts that train later, no longer, or are put in or replaced on the way."""

from __future__ import annotations

import torch
from parity_common import build, loader, mean, result, script
from torch import nn
from torch.nn import functional as F


def fit(accelerator, model, optimizer, batches, before=lambda step: None, epochs=1):
    """The ordinary loop; ``before(step)`` comes before each one's forward."""
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            before(len(losses))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


def sgd(model, lr=0.3, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


@script()
def gradual_unfreezing(accelerator):
    """The body is frozen before ``prepare`` and unfrozen in the loop; the optimizer holds everything."""
    model = build()
    model.body.requires_grad_(False)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(
        accelerator, model, optimizer, batches, lambda step: model.body.requires_grad_(True) if step == 2 else None
    )


@script()
def unfreezing_adds_group(accelerator):
    """The body is unfrozen in the loop, and ``optimizer.add_param_group`` takes it in."""
    model = build()
    model.body.requires_grad_(False)
    model, optimizer, batches = accelerator.prepare(model, sgd(model.head), loader())

    def before(step):
        if step == 2:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.1})

    return fit(accelerator, model, optimizer, batches, before)


@script()
def freezing_midway(accelerator):
    """The body is frozen after two steps."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    return fit(
        accelerator, model, optimizer, batches, lambda step: model.body.requires_grad_(False) if step == 2 else None
    )


@script()
def optimizer_holds_a_part(accelerator):
    """Only the head is given to the optimizer; the body has gradients that nobody uses."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model.head), loader())
    return fit(accelerator, model, optimizer, batches)


@script()
def alternating_parts(accelerator):
    """Body and head take turns: each is frozen in every other step."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        model.body.requires_grad_(step % 2 == 0)
        model.head.requires_grad_(step % 2 == 1)

    return fit(accelerator, model, optimizer, batches, before)


@script()
def frozen_for_a_step_under_adam(accelerator):
    """The body is frozen for one step and then trained again by AdamW, which counts steps of each parameter."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return fit(accelerator, model, optimizer, batches, lambda step: model.body.requires_grad_(step != 1))


@script()
def parameter_replaced(accelerator):
    """``model.head.weight = nn.Parameter(...)`` in the loop: no optimizer has the new one."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    other = build(seed=5).head.weight.detach()

    def before(step):
        if step == 2:
            model.head.weight = nn.Parameter(other.clone())

    return fit(accelerator, model, optimizer, batches, before)



class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@script()
def frozen_batch_norm(accelerator):
    """Batch normalisation in evaluation mode with its statistics of before, as fine-tuning does."""
    model = build(Normed)
    model.norm.running_mean.fill_(0.3)
    model.norm.running_var.fill_(2.0)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    model.train()
    model.norm.eval()
    return fit(accelerator, model, optimizer, batches)


@script()
def layer_reinitialised(accelerator):
    """``nn.init`` gives the head new weights in the loop."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        if step == 2:
            torch.manual_seed(9)
            nn.init.normal_(model.head.weight, std=0.2)
            nn.init.zeros_(model.head.bias)

    return fit(accelerator, model, optimizer, batches, before)


@script()
def weights_loaded_midway(accelerator):
    """``model.load_state_dict`` of weights of the script's own in the loop."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    other = build(seed=5).state_dict()
    return fit(
        accelerator, model, optimizer, batches, lambda step: model.load_state_dict(other) if step == 2 else None
    )


@script()
def best_weights_restored(accelerator):
    """``model.state_dict()`` is kept (copied) in the loop and loaded back at its end."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    kept = {}

    def before(step):
        if step == 2:
            kept.update({name: value.clone() for name, value in model.state_dict().items()})

    losses, _ = fit(accelerator, model, optimizer, batches, before)
    model.load_state_dict(kept)
    return result(accelerator, losses, model=model)


@script()
def weights_scaled_in_place(accelerator):
    """``p.mul_(0.9)`` after each step: weight decay by hand."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model, momentum=0.9), loader())

    def before(step):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)

    return fit(accelerator, model, optimizer, batches, before)


@script()
def data_assigned(accelerator):
    """``p.data = ...`` replaces one layer's weights in the loop."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        if step == 2:
            model.head.weight.data = model.head.weight.data * 0.5

    return fit(accelerator, model, optimizer, batches, before)


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two small matrices beside it."""

    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


@script()
def low_rank_by_hand(accelerator):
    """LoRA by hand, put in before ``prepare``; the optimizer holds what is trained."""
    model = build().requires_grad_(False)
    model.body[0], model.head = LowRank(model.body[0]), LowRank(model.head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return fit(accelerator, model, optimizer, batches)


@script()
def adapter_after_prepare(accelerator):
    """The model is prepared first; then its head gets an adapter, with an optimizer of its own, prepared then."""
    model, batches = accelerator.prepare(build(), loader())
    model.requires_grad_(False)
    torch.manual_seed(4)
    model.head = LowRank(model.head)
    optimizer = accelerator.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3))
    return fit(accelerator, model, optimizer, batches)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 16)]), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


@script()
def layer_appended(accelerator):
    """A network grows: ``model.blocks.append(...)`` in the loop, its parameters given to the optimizer."""
    model = build(Growing)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        if step == 2:
            torch.manual_seed(4)
            model.blocks.append(nn.Linear(16, 16))
            optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})

    return fit(accelerator, model, optimizer, batches, before)


@script()
def frozen_second_model(accelerator):
    """A frozen feature extractor, prepared without an optimizer, before a trained head."""
    extractor = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh())).requires_grad_(False).eval()
    head = build(lambda: nn.Linear(16, 4), seed=2)
    optimizer = sgd(head)
    extractor, head, optimizer, batches = accelerator.prepare(extractor, head, optimizer, loader())
    losses = []
    for x, y in batches:
        with torch.no_grad():
            features = extractor(x)
        loss = F.cross_entropy(head(features), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, head=head, extractor=extractor)


@script()
def initialised_after_prepare(accelerator):
    """``model.apply(init)`` after ``prepare`` fills each layer with numbers of the script's own."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def init(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(torch.linspace(-0.3, 0.3, module.weight.numel()).view(module.weight.shape))
                module.bias.fill_(0.1)

    model.apply(init)
    return fit(accelerator, model, optimizer, batches)


@script()
def double_after_prepare(accelerator):
    """``model.double()`` after ``prepare``, and inputs to match."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    model.double()
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x.double()), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def weights_as_one_vector(accelerator):
    """``parameters_to_vector``, a move of the whole vector, ``vector_to_parameters``."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.9 * vector.detach(), model.parameters())

    return fit(accelerator, model, optimizer, batches, before)


@script()
def data_exchanged(accelerator):
    """Two biases are given each other's memory: ``a.data, b.data = b.data, a.data``."""
    model = build()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())

    def before(step):
        if step == 2:
            a, b = model.body[0].bias, model.body[2].bias
            a.data, b.data = b.data, a.data

    return fit(accelerator, model, optimizer, batches, before)
