"""Weights that a script writes between steps in parts and other forms, and weights that a forward writes."""

from __future__ import annotations

import copy

import torch
from parity_common import BATCH, CLASSES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def nothing(model, step): ...


def fit(accelerator, model, *, after=nothing, between=nothing, batches=None, epochs=1):
    """An ordinary loop; ``after(model, step)`` follows each step, ``between`` each backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches or loader())
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            step = len(losses)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            between(model, step)
            optimizer.step()
            after(model, step)
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


# ---- by the script ---------------------------------------------------------------------------------------------------


@script()
def weights_scaled_before_the_step(accelerator):
    """Weights are clamped and scaled between backward and step, each parameter alone."""

    def between(model, step):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.4, 0.4)
                p.data.mul_(0.9)

    return fit(accelerator, build(), between=between)


@script()
def rows_and_columns_written(accelerator):
    """Rows, columns and masked elements of a weight are written by index."""

    def after(model, step):
        weight = model.body[2].weight
        with torch.no_grad():
            weight[1] = torch.linspace(0, 1, 16)
            weight[5].copy_(torch.linspace(1, 0, 16))
            weight[:, 2] += 0.1
            weight.masked_fill_((torch.arange(256) % 3 == 0).view(16, 16), 0.05)
            model.head.weight[3].fill_(0.2)

    return fit(accelerator, build(), after=after)


@script()
def data_through_another_type(accelerator):
    """``p.data`` is given float64, and then float32 again."""

    def after(model, step):
        weight = model.head.weight
        if step == 1:
            weight.data = weight.data.double()
            weight.data = weight.data.float()

    return fit(accelerator, build(), after=after)


@script()
def data_with_other_strides(accelerator):
    """``p.data`` is given the same values column by column, as ``.to(memory_format=...)`` does."""

    def after(model, step):
        weight = (model.head, model.body[0])[step % 2].weight
        weight.data = weight.data.t().contiguous().t()

    return fit(accelerator, build(), after=after)


@script()
def initialised_from_each_ranks_seed(accelerator):
    """Layers are made anew in the loop from seeds that differ by rank: the numbers are the main process's, or none."""

    def after(model, step):
        if step == 1:
            torch.manual_seed(step + 10 * accelerator.process_index)
            model.body[2].reset_parameters()
            nn.init.trunc_normal_(model.head.bias, std=0.1)
            nn.init.eye_(model.body[0].weight)
            model.head.load_state_dict(nn.Linear(16, CLASSES).state_dict())

    return fit(accelerator, build(), after=after)


@script()
def early_weights_restored(accelerator):
    """``copy.deepcopy(model.state_dict())`` is kept in the loop and loaded two steps later."""
    kept = {}

    def after(model, step):
        if step == 0:
            kept.update(copy.deepcopy(model.state_dict()))
        if step == 2:
            model.load_state_dict(kept)

    return fit(accelerator, build(), after=after)


@script()
def moved_after_each_step(accelerator):
    """``model.to("cpu")`` after each step, where the model is already."""
    return fit(accelerator, build(), after=lambda model, step: model.to("cpu"))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 16), nn.Linear(16, CLASSES)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def words():
    return loader(torch.arange(4 * BATCH) * 5 % 7, torch.arange(4 * BATCH) * 3 % CLASSES)


@script(follows="embedding_max_norm forward_bounds_the_rows_it_reads")
def rows_shortened_after_each_step(accelerator):
    """``table.copy_(torch.renorm(table, ...))``, as the refusals of ``max_norm`` advise."""

    def after(model, step):
        with torch.no_grad():
            table = model.table.weight
            table.copy_(torch.renorm(table, 2, 0, 0.5))

    return fit(accelerator, build(Words), after=after, batches=words())


@script()
def averaged_from_the_first_step_on(accelerator):
    """``AveragedModel`` is made when one step is done, and its ``module.state_dict()`` is what is kept in the end."""
    averages = []

    def after(model, step):
        if not averages:
            averages.append(AveragedModel(model))
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        for average in averages:
            average.update_parameters(model)

    losses, weights = fit(accelerator, build(), after=after)
    for number, average in enumerate(averages):
        weights |= {f"{number}.{name}": value.clone() for name, value in average.module.state_dict().items()}
    return losses, weights


# ---- by a forward ----------------------------------------------------------------------------------------------------


class ClampsItself(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def with_clamping_layer():
    model = Net()
    model.body[2] = ClampsItself(16, 16)
    return model


@script()
def layer_clamps_itself(accelerator):
    """A layer clamps its own weight in each forward."""
    return fit(accelerator, build(with_clamping_layer))


class ClampsBefore(Net):
    def forward(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@script()
def forward_clamps_a_layer_before_its_call(accelerator):
    """The model clamps the weight of a layer, and then calls the layer."""
    return fit(accelerator, build(ClampsBefore))


class ClampsAfter(Net):
    def forward(self, x):
        x = super().forward(x)
        self.head.weight.data.clamp_(-0.1, 0.1)
        return x


@script()
def forward_clamps_a_layer_after_its_call(accelerator):
    """The model clamps the weight of a layer that it has called, through ``data``."""
    return fit(accelerator, build(ClampsAfter))


class Normalising(Net):
    def forward(self, x):
        self.head.weight.data = F.normalize(self.head.weight.data)
        return super().forward(x)


@script()
def forward_assigns_data(accelerator):
    """Forward normalises a weight by ``weight.data = F.normalize(weight.data)``, as weights of cosine heads are."""
    return fit(accelerator, build(Normalising))


class Bounded(Words):
    def forward(self, ids):
        return self.head(F.embedding(ids, self.table.weight, max_norm=0.5))


@script()
def forward_bounds_the_rows_it_reads(accelerator):
    """``F.embedding(ids, weight, max_norm=0.5)``, which writes to the rows that a batch reads."""
    return fit(accelerator, build(Bounded), batches=words())


class Swapping(Words):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, ids):
        self.count += 1
        if self.count == 3:
            with torch.no_grad():
                self.table.weight.copy_(self.table.weight.flip(0).clone())
        return super().forward(ids)


@script()
def forward_swaps_rows_once(accelerator):
    """The third forward turns the rows of a table round, whose sum and norm stay as they are."""
    return fit(accelerator, build(Swapping), batches=words())


class ClampsLate(Net):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        if self.count > 5:
            with torch.no_grad():
                self.body[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@script()
def later_forwards_clamp_under_no_grad(accelerator):
    """A forward begins to clamp a layer's weight after five steps, under ``no_grad``."""
    return fit(accelerator, build(ClampsLate), epochs=2)


class Encoding(Net):
    def encode(self, x):
        return self.body(x)


@script()
def layer_called_alone_clamps_itself_later(accelerator):
    """``model.head(model.encode(x))``, where the head clamps its weight from the fifth step on."""
    model = build(Encoding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    layer = model.head
    forward = layer.forward

    def clamped(x):
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)
        return forward(x)

    losses = []
    for _ in range(2):
        for x, y in batches:
            if len(losses) == 4:
                layer.forward = clamped
            loss = F.cross_entropy(layer(model.encode(x)), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def clamped_between_two_ways_in(accelerator):
    """Weights are clamped, read by a forward without gradients, and trained by way of a method of the model."""
    model = build(Encoding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
            seen = model(x).pow(2).mean()
        other = model.encode(x).pow(2).mean() + 0.0 * F.cross_entropy(model(x), y)
        accelerator.backward(other)
        optimizer.step()
        optimizer.zero_grad()
        losses += [mean(accelerator, each) for each in (loss, seen, other)]
    return result(accelerator, losses, model=model)


class Collecting(nn.Module):
    """Writes its rows into memory that it makes, as layers of experts do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        rows = torch.zeros(len(x), 16)
        return rows.index_add_(0, torch.arange(len(x)), self.inner(x))


class Collected(Net):
    """Its loss is a sum over memory that it makes and writes, divided by the number of labels that count."""

    def __init__(self):
        super().__init__()
        self.body[2] = Collecting()

    def forward(self, x, y):
        logits = torch.zeros(len(x), CLASSES)
        logits.index_add_(0, torch.arange(len(x)), super().forward(x))
        chosen = logits.log_softmax(-1).gather(1, y.clamp(min=1)[:, None])[:, 0]
        return -(chosen * (y > 0)).sum() / (y > 0).sum()


@script(whole_batch="divides by the number of labels in its batch that count")
def rows_collected_in_new_memory(accelerator):
    """Layers and the loss write rows into tensors that forward makes."""
    model = build(Collected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    y = torch.arange(4 * BATCH) % CLASSES
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(points()[0] + noise(4 * BATCH, 8), y))
    losses = []
    for x, y in batches:
        loss = model(x, y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)
