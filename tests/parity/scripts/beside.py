"""What stands beside the model: parameters that an optimizer steps and no prepared model holds."""

from __future__ import annotations

import itertools

import torch
from parity_common import BATCH, CLASSES, FEATURES, build, loader, noise, points, result, script
from torch import nn
from torch.nn import functional as F

RATE = 0.3


def fit(accelerator, model, optimizers, batches, loss_of, beside, clip=None):
    """The ordinary loop; the parameters beside the model are handed back with its weights, norms as losses."""
    losses = []
    for batch in batches:
        loss = loss_of(*batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(loss)
        if clip is not None:
            losses.append(float(accelerator.clip_grad_norm_(clip(), 0.1)))
        for optimizer in optimizers:
            optimizer.step()
    losses, found = result(accelerator, losses, model=model)
    return losses, found | {name: value.detach().clone() for name, value in beside.items()}


@script()
def temperature_in_the_models_optimizer(accelerator):
    """CLIP's temperature is a parameter of the script, in the optimizer of the model; the last batch is short."""
    model, temperature = build(), nn.Parameter(torch.tensor(0.3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=RATE, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer], batches,
        lambda x, y: F.cross_entropy(model(x) * temperature.exp(), y), {"temperature": temperature},
    )  # fmt: skip


@script(follows="temperature_in_the_models_optimizer loose_loss_weights")
def temperature_with_a_prepared_optimizer(accelerator):
    """CLIP's temperature has an optimizer of its own, which is prepared too, and weight decay."""
    model, temperature = build(), nn.Parameter(torch.tensor(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    other = torch.optim.AdamW([temperature], lr=0.05, weight_decay=0.1)
    model, optimizer, other, batches = accelerator.prepare(model, optimizer, other, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer, other], batches,
        lambda x, y: F.cross_entropy(model(x) * temperature.exp(), y), {"temperature": temperature},
    )  # fmt: skip


@script()
def head_beside_the_model(accelerator):
    """ArcFace: the head with the classes' centres was never prepared, its parameters are in the model's optimizer."""
    model, head = build(), build(lambda: nn.Linear(CLASSES, CLASSES, bias=False), seed=5)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(4 * BATCH - 5)))

    def loss_of(x, y):
        cosine = F.linear(F.normalize(model(x)), F.normalize(head.weight))
        return F.cross_entropy(4 * (cosine - 0.2 * F.one_hot(y, CLASSES)), y)

    return fit(accelerator, model, [optimizer], batches, loss_of, {"head": head.weight})


@script(follows="head_beside_the_model")
def head_with_a_prepared_optimizer(accelerator):
    """A head that was never prepared has a prepared optimizer of its own, with the bias in a group of its own."""
    model, head = build(), build(lambda: nn.Linear(CLASSES, CLASSES), seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    other = torch.optim.SGD([{"params": [head.weight]}, {"params": [head.bias], "lr": 0.01}], lr=0.1, momentum=0.9)
    model, optimizer, other, batches = accelerator.prepare(model, optimizer, other, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer, other], batches,
        lambda x, y: F.cross_entropy(head(model(x)), y), {"weight": head.weight, "bias": head.bias},
    )  # fmt: skip


@script()
def clipped_with_the_model(accelerator):
    """One clipping norm over the model's parameters and one beside it."""
    model, scale = build(), nn.Parameter(torch.full((CLASSES,), 2.0))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer], batches, lambda x, y: F.cross_entropy(model(x) * scale, y), {"scale": scale},
        clip=lambda: [*model.parameters(), scale],
    )  # fmt: skip


@script(follows="clipped_with_the_model")
def clipped_with_two_optimizers(accelerator):
    """One clipping norm over the parameters of two optimizers, of which one holds what stands beside the model."""
    model, scale = build(), nn.Parameter(torch.full((CLASSES,), 2.0))
    optimizer, other = torch.optim.SGD(model.parameters(), lr=RATE), torch.optim.SGD([scale], lr=RATE)
    model, optimizer, other, batches = accelerator.prepare(model, optimizer, other, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer, other], batches,
        lambda x, y: F.cross_entropy(model(x) * scale, y), {"scale": scale},
        clip=lambda: [*model.parameters(), scale],
    )  # fmt: skip


class ListOfLayers(nn.Module):
    """Layers in a plain list, which torch does not know of."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.hidden = [nn.Linear(16, 16), nn.Linear(16, 16)]
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.first(x).tanh()
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.last(x)


def listed(model):
    return [each for layer in model.hidden for each in layer.parameters()]


@script()
def layers_in_a_list(accelerator):
    """Layers in a plain list, whose parameters the script adds to the optimizer by hand."""
    model = build(ListOfLayers)
    optimizer = torch.optim.SGD([*model.parameters(), *listed(model)], lr=RATE, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer], batches, lambda x, y: F.cross_entropy(model(x), y),
        {f"hidden.{number}": each for number, each in enumerate(listed(model))},
    )  # fmt: skip


@script()
def layers_in_a_list_not_prepared(accelerator):
    """Layers in a plain list, with an optimizer of their own that is not prepared."""
    model = build(ListOfLayers)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=RATE), torch.optim.SGD(listed(model), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    return fit(
        accelerator, model, [optimizer, other], batches, lambda x, y: F.cross_entropy(model(x), y),
        {f"hidden.{number}": each for number, each in enumerate(listed(model))},
    )  # fmt: skip


@script(follows="layers_in_a_list")
def layers_in_a_list_with_a_prepared_optimizer(accelerator):
    """Layers in a plain list, with a prepared optimizer of their own."""
    model = build(ListOfLayers)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=RATE), torch.optim.SGD(listed(model), lr=RATE)
    model, optimizer, other, batches = accelerator.prepare(model, optimizer, other, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer, other], batches, lambda x, y: F.cross_entropy(model(x), y),
        {f"hidden.{number}": each for number, each in enumerate(listed(model))},
    )  # fmt: skip


@script()
def soft_prompt_before_a_frozen_model(accelerator):
    """A soft prompt before a frozen model is all that is trained, by a prepared optimizer."""
    model, prompt = build().requires_grad_(False), nn.Parameter(noise(FEATURES))
    optimizer = torch.optim.Adam([prompt], lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(4 * BATCH - 5)))
    return fit(
        accelerator, model, [optimizer], batches, lambda x, y: F.cross_entropy(model(x + prompt), y), {"prompt": prompt}
    )


def loss_weights_in_plain_windows():
    model, weights = build(), nn.Parameter(torch.zeros(2))
    optimizer, other = torch.optim.SGD(model.parameters(), lr=RATE), torch.optim.SGD([weights], lr=0.05)
    batches = list(loader(*points(4 * BATCH - 5)))
    for window in (batches[:2], batches[2:]):
        for x, y in window:
            logits = model(x)
            both = torch.stack([F.cross_entropy(logits, y, reduction="sum"), logits.pow(2).sum()])
            loss = (both * (-weights).exp()).sum() + len(x) * weights.sum()
            (loss / sum(len(each) for each, _ in window)).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    found = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    return [], found | {"weights": weights.detach().clone()}


@script(gradient_accumulation_steps=2, reference=loss_weights_in_plain_windows)
def loss_weights_in_windows(accelerator):
    """Learned log-variances of two losses, sums over items, windows of two batches."""
    model, weights = build(), nn.Parameter(torch.zeros(2))
    optimizer, other = torch.optim.SGD(model.parameters(), lr=RATE), torch.optim.SGD([weights], lr=0.05)
    model, optimizer, other, batches = accelerator.prepare(model, optimizer, other, loader(*points(4 * BATCH - 5)))
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            logits = model(x)
            both = torch.stack([F.cross_entropy(logits, y, reduction="sum"), logits.pow(2).sum()])
            accelerator.backward((both * (-weights).exp()).sum() + len(x) * weights.sum(), num_items=len(x))
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
    losses, found = result(accelerator, losses, model=model)
    return losses, found | {"weights": weights.detach().clone()}


# ---- losses over other rows than those of the batch ------------------------------------------------------------------

SHORT = 3 * BATCH + 5
"""Samples of a run whose last batch is short, and of which no number of processes holds equal parts."""


def replay(accelerator, samples):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(samples)))
    kept = None
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        if kept is not None:
            accelerator.backward(F.cross_entropy(model(kept[0]), kept[1]))
        optimizer.step()
        kept = kept or (x, y)
    return result(accelerator, [], model=model)


@script()
def replay_of_a_kept_batch(accelerator):
    """Continual learning: the first batch is kept, and trained on again after each other one."""
    return replay(accelerator, SHORT)


@script()
def replay_beside_a_single_row(accelerator):
    """A batch is kept, and trained on again beside a last batch of one sample, which one process alone holds."""
    return replay(accelerator, 3 * BATCH + 1)


@script(follows="batch_and_memory_in_one_loss")
def memory_beside_the_batch(accelerator):
    """A memory of some samples of each class, the same on every process, has a backward of its own."""
    model, memory = build(), points(5, seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(SHORT)))
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.backward(0.5 * (model(memory[0]) - 1).pow(2).mean())
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def penalty_with_a_backward_of_its_own(accelerator):
    """A penalty on the weights has a backward of its own, also in the step of the short batch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(SHORT)))
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.backward(0.01 * sum(each.pow(2).sum() for each in model.parameters()))
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def held_out_batch_for_the_log(accelerator):
    """A held-out batch is fetched by ``next`` in the loop, and its loss is only logged."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    held_out = loader(*points(4 * BATCH, seed=7))
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, loader(*points(SHORT)), held_out)
    others, losses = iter(held_out), []
    for x, y in batches:
        a, b = next(others)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        with torch.no_grad():
            losses.append(accelerator.reduce(F.cross_entropy(model(a), b), "mean").item())
    return result(accelerator, losses, model=model)


@script()
def a_backward_for_each_loader(accelerator):
    """Two loaders are zipped, and the loss of each has a backward of its own; the last batches differ in length."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, one, other = accelerator.prepare(
        model, optimizer, loader(*points(SHORT)), loader(*points(4 * BATCH - 1, seed=7))
    )
    for (x, y), (a, b) in zip(one, other, strict=True):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.backward(0.3 * F.cross_entropy(model(a), b))
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def two_views_in_one_forward(accelerator):
    """Two views of each sample go through the model together; the last batch is short."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(SHORT)))
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, y])))
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def one_loss_for_each_row(accelerator):
    """A loop adds the loss of each row and divides by their number; the last batch is short."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(SHORT)))
    for x, y in batches:
        logits = model(x)
        optimizer.zero_grad()
        accelerator.backward(sum(F.cross_entropy(row[None], label[None]) for row, label in zip(logits, y)) / len(y))  # noqa: B905
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def batch_and_memory_in_one_loss(accelerator):
    """One loss adds the mean over the batch and a mean over a memory."""
    model, memory = build(), points(5, seed=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(SHORT)))
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(memory[0]), memory[1]))
        optimizer.step()
    return result(accelerator, [], model=model)


# ---- sums that look like means ---------------------------------------------------------------------------------------


def summed(accelerator, loss_of, samples=4 * BATCH, rate=0.02):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(*points(samples)))
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(x), y, number))
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def half_a_sum_of_squares(accelerator):
    """Least squares as textbooks write it: half of a sum."""
    return summed(accelerator, lambda logits, y, _: ((logits - F.one_hot(y, CLASSES)) ** 2).sum() / 2)


@script()
def losses_of_rows_in_a_stack(accelerator):
    """A loss for each row times a reward, stacked and added up."""

    def loss_of(logits, y, _):
        chosen = torch.distributions.Categorical(logits=logits).log_prob(y)
        return torch.stack([-one * (0.5 + label) for one, label in zip(chosen, y, strict=True)]).sum()

    return summed(accelerator, loss_of)


@script()
def losses_of_rows_joined(accelerator):
    """A loss for each row, joined by ``torch.cat`` and added up."""

    def loss_of(logits, y, _):
        losses = [F.cross_entropy(row[None], label[None], reduction="none") for row, label in zip(logits, y)]  # noqa: B905
        return torch.cat(losses).sum()

    return summed(accelerator, loss_of)


@script()
def a_mean_that_becomes_a_sum(accelerator):
    """The same loss function returns means in the first steps and sums in the others."""
    return summed(
        accelerator,
        lambda logits, y, number: F.cross_entropy(logits, y, reduction="mean" if number < 2 else "sum"),
    )


@script()
def a_median_for_each_class(accelerator):
    """The median over the batch of each class is a number of the whole batch, and no sum over its rows."""
    return summed(
        accelerator,
        lambda logits, y, _: F.cross_entropy(logits, y) + 0 * logits.quantile(0.5, 0).sum(),
    )


@script()
def mean_times_its_share_of_the_batch(accelerator):
    """A mean times the rows of this rank over those of all, so that a short batch weighs less."""
    return summed(
        accelerator, lambda logits, y, _: F.cross_entropy(logits, y) * len(y) / BATCH, 4 * BATCH - 5, RATE
    )


@script(follows="mean_times_its_share_of_the_batch")
def mean_times_its_share_times_the_processes(accelerator):
    """The same, multiplied by the processes over which losses are averaged: as many as share a batch."""
    ranks = 1

    def loss_of(logits, y, number):
        nonlocal ranks
        if number == 0:
            ranks = BATCH // len(y)
        return F.cross_entropy(logits, y) * len(y) * ranks / BATCH

    return summed(accelerator, loss_of, 4 * BATCH - 5, RATE)


@script()
def mean_times_its_share_as_one_factor(accelerator):
    """The same with one factor, ``loss * (len(x) / batch_size)``, which a full batch does not tell from a constant."""
    return summed(
        accelerator, lambda logits, y, _: F.cross_entropy(logits, y) * (len(y) / BATCH), 4 * BATCH - 5, RATE
    )


@script(follows="mean_times_its_share_as_one_factor")
def mean_times_its_share_as_one_factor_and_the_processes(accelerator):
    """The same, multiplied by the processes that share a batch."""
    ranks = 1

    def loss_of(logits, y, number):
        nonlocal ranks
        if number == 0:
            ranks = BATCH // len(y)
        return F.cross_entropy(logits, y) * (len(y) / BATCH) * ranks

    return summed(accelerator, loss_of, 4 * BATCH - 5, RATE)


# ---- short batches that are kept until a later loop ------------------------------------------------------------------


def step(accelerator, optimizer, *losses):
    optimizer.zero_grad()
    for loss in losses:
        accelerator.backward(loss())
    optimizer.step()


def several_epochs(accelerator, number=3):
    """A model, its optimizer, and batches of which the last one is short."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return accelerator.prepare(model, optimizer, loader(*points(number * BATCH + 7)))


@script()
def one_batch_behind_in_all_epochs(accelerator):
    """Each step trains on the batch before, also on the short last one of the epoch before."""
    model, optimizer, batches = several_epochs(accelerator)
    before = None
    for _ in range(3):
        for batch in batches:
            if before is not None:
                x, y = before
                step(accelerator, optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
            before = batch
    return result(accelerator, [], model=model)


@script()
def one_batch_behind_with_inputs_changed(accelerator):
    """The same, where only the labels that are kept are those of the loader."""
    model, optimizer, batches = several_epochs(accelerator)
    before = None
    for _ in range(3):
        for x, y in batches:
            if before is not None:
                u, v = before
                step(accelerator, optimizer, lambda u=u, v=v: F.cross_entropy(model(u), v))
            before = x * 2, y
    return result(accelerator, [], model=model)


@script()
def batches_that_cycle_repeats(accelerator):
    """``zip(labelled, itertools.cycle(others))``, whose short batch comes again; each loss has a backward."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, labelled, others = accelerator.prepare(
        model, optimizer, loader(*points(8 * BATCH)), loader(noise(BATCH + 7, FEATURES))
    )
    for (x, y), (u,) in zip(labelled, itertools.cycle(others), strict=False):
        step(
            accelerator,
            optimizer,
            lambda x=x, y=y: F.cross_entropy(model(x), y),
            lambda u=u: model(u).pow(2).mean(),
        )
    return result(accelerator, [], model=model)


@script()
def kept_batch_beside_that_of_another_loader(accelerator):
    """The short batch of one loader is trained on in the loop of another, with a penalty on the weights."""
    model, optimizer, batches = several_epochs(accelerator)
    others = accelerator.prepare(loader(*points(seed=9)))
    *_, (u, v) = batches
    for x, y in others:
        step(accelerator, optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
        penalty = 0.01 * sum(each.pow(2).sum() for each in model.parameters())
        step(accelerator, optimizer, lambda penalty=penalty: F.cross_entropy(model(u), v) + penalty)
    return result(accelerator, [], model=model)
