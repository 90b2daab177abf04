"""What scripts call on parameters and models beside training: arrays, parts, odd shapes, scalers, aliases."""

from __future__ import annotations

import numpy as np
import torch
from parity_common import CLASSES, FEATURES, Net, build, loader, mean, result, script
from torch import nn
from torch.nn import functional as F


def plain_update(accelerator, model, optimizer, x, y, _step):
    """Train on one batch."""
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    return loss


def trained(
    accelerator, model, each_step=None, before=None, optimizer_class=torch.optim.SGD, rate=0.1, update=plain_update
):
    """Train two epochs; ``each_step(model, optimizer)`` comes after each step, ``before(model)`` after ``prepare``."""
    optimizer = optimizer_class(model.parameters(), lr=rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    if before is not None:
        before(model)
    losses = []
    for step, (x, y) in enumerate(batch for _ in range(2) for batch in batches):
        optimizer.zero_grad()
        losses.append(mean(accelerator, update(accelerator, model, optimizer, x, y, step)))
        if each_step is not None:
            losses += each_step(model, optimizer) or []
    return result(accelerator, losses, model=model)


@script()
def histogram_of_weights(accelerator):
    """Weights become arrays of numpy for a histogram after each step."""

    def histogram(model, _optimizer):
        counts = [np.histogram(p.detach().cpu().numpy(), bins=4, range=(-1, 1))[0] for p in model.parameters()]
        return [float(each) for each in np.sum(counts, axis=0)]

    return trained(accelerator, build(), histogram)


@script()
def weights_as_lists_and_arrays(accelerator):
    """Weights are read as lists and by numpy's own functions."""

    def read(model, _optimizer):
        rows = [p.tolist() for p in model.parameters() if p.ndim == 1]
        with torch.no_grad():
            norms = [float(np.linalg.norm(np.asarray(p.detach()))) for p in model.parameters()]
        return [sum(map(sum, rows)), *norms]

    return trained(accelerator, build(), read)


@script()
def pruned_by_a_percentile_of_numpy(accelerator):
    """The smallest weights of each matrix are set to zero, found by a percentile of numpy."""

    def prune(model, _optimizer):
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    threshold = float(np.percentile(np.abs(p.detach().numpy()), 30))
                    p.mul_((p.abs() > threshold).to(p.dtype))

    return trained(accelerator, build(), prune)


@script()
def weights_written_from_an_array(accelerator):
    """Weights are rounded in numpy and copied back."""

    def rounded(model, _optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.from_numpy(np.round(p.detach().cpu().numpy(), 2)))

    return trained(accelerator, build(), rounded)


@script()
def thresholds_by_quantiles(accelerator):
    """Weights above a quantile are clamped to it."""

    def clamp(model, _optimizer):
        tops = []
        with torch.no_grad():
            for p in model.parameters():
                top = p.abs().quantile(0.9).item()
                p.clamp_(-top, top)
                tops.append(top)
        return tops

    return trained(accelerator, build(), clamp)


@script()
def parts_of_weights_scaled(accelerator):
    """Rows of a weight are scaled in place by ``unbind`` and ``chunk``."""

    def scale(model, _optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.unbind(0)[0].mul_(0.9)
                p.chunk(2)[1].mul_(0.8)

    return trained(accelerator, build(), scale)


@script()
def parts_of_gradients_scaled(accelerator):
    """Rows of a gradient are scaled in place by ``chunk`` before the step."""

    def update(accelerator, model, optimizer, x, y, _step):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        for p in model.parameters():
            p.grad.chunk(2)[0].mul_(0.5)
        optimizer.step()
        return loss

    return trained(accelerator, build(), update=update)


@script()
def weights_loaded_by_assignment(accelerator):
    """Other weights are loaded after ``prepare`` with ``assign=True``."""
    other = build(seed=5).state_dict()
    return trained(accelerator, build(), before=lambda model: model.load_state_dict(other, assign=True) and None)


class Transposed(nn.Module):
    """A weight that is the transposed view of other memory."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 16)
        self.weight = nn.Parameter(torch.randn(16, CLASSES).t() / 4)

    def forward(self, x):
        return F.linear(torch.tanh(self.body(x)), self.weight)


@script()
def weight_that_is_transposed(accelerator):
    """A parameter does not lie in memory row by row."""
    return trained(accelerator, build(Transposed))


class Images(nn.Module):
    """A small convolutional network over ``F`` features as an image of 2 by 4."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x.view(-1, 1, 2, 4)))
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


@script()
def convolutions_in_channels_last(accelerator):
    """The weights of convolutions are channels last before ``prepare``."""
    return trained(accelerator, build(Images).to(memory_format=torch.channels_last))


class Tiny(nn.Module):
    """Parameters of no element, of one and of no dimension beside ordinary ones."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_row = nn.Parameter(torch.empty(0, CLASSES))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.net(x + self.shift) * self.scale + self.nothing.sum() + self.no_row.sum(0)


@script()
def parameters_of_no_element(accelerator):
    """A parameter has no element, another no dimension."""
    return trained(accelerator, build(Tiny))


@script()
def parameters_of_no_element_by_adam(accelerator):
    """The same with the states of Adam."""
    return trained(accelerator, build(Tiny), optimizer_class=torch.optim.AdamW, rate=0.01)


class Aliased(nn.Module):
    """Queries and keys come from one layer that has two names."""

    def __init__(self):
        super().__init__()
        self.a, self.q, self.b = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.k = self.q

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(torch.tanh(self.q(h)) + self.k(h))


@script()
def one_layer_under_two_names(accelerator):
    """A layer has two names and is called by both."""
    return trained(accelerator, build(Aliased))


class SharedBlock(nn.Module):
    """One block stands three times in a list, as in ALBERT."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.first = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList([block] * 3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@script()
def one_block_three_times(accelerator):
    """A block stands three times in a list of layers."""
    return trained(accelerator, build(SharedBlock))


@script()
def scaler_of_torch(accelerator):
    """The script scales its losses by torch's own ``GradScaler``, without unscaling by hand."""

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(accelerator, model, optimizer, x, y, _step):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        return loss

    return trained(accelerator, build(), update=update)


@script()
def trained_in_eval_mode(accelerator):
    """A model is fine-tuned in eval mode, so that dropout stays off."""
    model = build(lambda: nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)))
    return trained(accelerator, model, before=lambda model: model.eval() and None)


@script(follows="trained_in_eval_mode")
def trained_with_its_parts_in_eval_mode(accelerator):
    """The same where the model itself stays in training mode, as a pipeline asks for."""

    def parts_in_eval_mode(model):
        model.train()
        for part in model.children():
            part.eval()

    model = build(lambda: nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)))
    return trained(accelerator, model, before=parts_in_eval_mode)


@script()
def gradient_of_a_vector_loss(accelerator):
    """A loss for each row goes backward with weights as its gradient."""

    def update(accelerator, model, optimizer, x, y, _step):
        rows = F.cross_entropy(model(x), y, reduction="none")
        loss = rows.mean()
        accelerator.backward(rows, gradient=torch.full_like(rows, 1 / len(rows)))
        found = loss.detach().clone()
        optimizer.step()
        return found

    return trained(accelerator, build(), update=update)


@script()
def penalty_with_its_own_backward(accelerator):
    """A penalty over parameters alone goes backward by itself every second step."""

    def update(accelerator, model, optimizer, x, y, step):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if step % 2:
            accelerator.backward(1e-2 * sum(p.pow(2).sum() for p in model.parameters()))
        optimizer.step()
        return loss

    return trained(accelerator, build(), update=update)


class Switch(nn.Module):
    """Each row goes to one of four experts; with few rows an expert has none."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        share = self.gate(x).softmax(1)
        weight, chosen = share.max(1)
        out = torch.zeros(len(x), 16)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.head(torch.tanh(out))


@script()
def experts_chosen_by_the_top_share(accelerator):
    """Experts see the rows that chose them, on some ranks none."""
    return trained(accelerator, build(Switch))


class Branches(nn.Module):
    """A forward that branches on the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.late = nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        out = self.net(x)
        late = out > 10
        if late.any():
            out = out.clamp(max=10)
        return self.late(torch.tanh(out))


@script()
def forward_branches_on_values(accelerator):
    """The forward takes another way where a tensor is large."""
    return trained(accelerator, build(Branches))


@script()
def encoder_of_two_models_with_two_optimizers(accelerator):
    """Two models share an encoder, and each has an optimizer of its own."""
    encoder = build(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh()))
    heads = build(lambda: nn.Linear(16, CLASSES), 2), build(lambda: nn.Linear(16, 1), 3)
    first, second = (nn.Sequential(encoder, head) for head in heads)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second)]
    first, second, *optimizers, batches = accelerator.prepare(first, second, *optimizers, loader())
    losses = []
    for x, y in batches:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y) if out.shape[1] == CLASSES else out.pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, first=first, second=second)


