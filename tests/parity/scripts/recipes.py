"""Recipes of every day: samplers with a state, hard examples, penalties, codes of samples, replay, meta-learning."""

from __future__ import annotations

import copy

import numpy as np
import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

RATE = 0.3


def start(accelerator, kind=Net, data=None):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return accelerator.prepare(model, optimizer, loader() if data is None else data)


def fit(accelerator, model, optimizer, batches, loss_of=None, epochs=1):
    losses = []
    for _ in range(epochs):
        for batch in batches:
            loss = F.cross_entropy(model(batch[0]), batch[1]) if loss_of is None else loss_of(model, *batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


# ---- losses ----------------------------------------------------------------------------------------------------------


@script()
def triplets_of_three_forwards(accelerator):
    """Anchor, positive and negative: three forwards and one loss."""
    data = loader(*(noise(4 * BATCH, FEATURES, seed=seed) for seed in (4, 5, 6)))
    model, optimizer, batches = start(accelerator, data=data)
    return fit(
        accelerator, model, optimizer, batches,
        lambda model, *views: F.triplet_margin_loss(*map(model, views), margin=5.0),
    )  # fmt: skip


@script()
def orthogonal_by_a_penalty(accelerator):
    """The rows of a square matrix are held orthogonal by a penalty."""
    model, optimizer, batches = start(accelerator)

    def loss_of(model, x, y):
        weight = model.body[2].weight
        apart = weight @ weight.T - torch.eye(16)
        return F.cross_entropy(model(x), y) + 0.1 * apart.pow(2).sum()

    return fit(accelerator, model, optimizer, batches, loss_of)


class Orthogonal(Net):
    """Returns the penalty beside the logits, the same for each row; ``(B, F) -> (B, C), (B,)``."""

    def forward(self, x):
        weight = self.body[2].weight
        apart = weight @ weight.T - torch.eye(16)
        return super().forward(x), apart.pow(2).sum().expand(len(x))


@script(follows="orthogonal_by_a_penalty")
def orthogonal_by_a_penalty_in_forward(accelerator):
    """The same, where forward computes the penalty."""
    model, optimizer, batches = start(accelerator, Orthogonal)

    def loss_of(model, x, y):
        logits, penalty = model(x)
        return F.cross_entropy(logits, y) + 0.1 * penalty.mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


@script()
def divided_by_its_running_mean(accelerator):
    """A loss is divided by the running mean of what it was over all processes."""
    model, optimizer, batches = start(accelerator)
    known = []

    def loss_of(model, x, y):
        loss = F.cross_entropy(model(x), y)
        now = accelerator.reduce(loss.detach(), "mean")
        known.append(now if not known else 0.9 * known[-1] + 0.1 * now)
        return loss / known[-1]

    return fit(accelerator, model, optimizer, batches, loss_of)


class Tokens(Net):
    """Logits of four tokens in each row; ``(B, F) -> (B, 4, C)``."""

    def forward(self, x):
        return super().forward(x.unflatten(1, (4, 2)).repeat(1, 1, 4))


@script()
def packed_tokens_with_weights(accelerator):
    """Sequences are packed, each token has a weight, some none: a sum over tokens, divided by the weights of all."""
    labels = torch.randint(CLASSES, (4 * BATCH, 4), generator=torch.Generator().manual_seed(2))
    weights = noise(4 * BATCH, 4, seed=8).abs() * (noise(4 * BATCH, 4, seed=9) > -0.5)
    data = loader(noise(4 * BATCH, FEATURES), labels, weights)
    model, optimizer, batches = start(accelerator, Tokens, data)
    for x, y, w in batches:
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        optimizer.zero_grad()
        accelerator.backward((each * w).sum(), num_items=w.sum())
        optimizer.step()
    return result(accelerator, [], model=model)


@script()
def gan_with_the_slope_at_real_samples(accelerator):
    """A GAN whose critic pays for its slope at real samples (R1), with an optimizer for each."""
    generator = build(lambda: Net(FEATURES, FEATURES))
    critic = build(lambda: Net(FEATURES, 1), seed=2)
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.Adam(critic.parameters(), lr=0.01)
    generator, critic, first, second, batches = accelerator.prepare(
        generator, critic, first, second, loader(noise(4 * BATCH, FEATURES), noise(4 * BATCH, FEATURES, seed=5))
    )
    losses = []
    for real, z in batches:
        real = real.clone().requires_grad_()  # noqa: PLW2901 (as people write it)
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        fooled = F.softplus(critic(generator(z).detach())).mean()
        loss = fooled + F.softplus(-scores).mean() + 0.5 * slope.pow(2).sum(1).mean()
        second.zero_grad()
        accelerator.backward(loss)
        second.step()
        made = F.softplus(-critic(generator(z))).mean()
        first.zero_grad()
        second.zero_grad()
        accelerator.backward(made)
        first.step()
        losses += [mean(accelerator, loss), mean(accelerator, made)]
    return result(accelerator, losses, generator=generator, critic=critic)


# ---- data ------------------------------------------------------------------------------------------------------------


class Ongoing(Sampler):
    """Goes on where it stood, in epochs that are shorter than the data."""

    def __init__(self, size, length):
        self.size, self.length, self.at = size, length, 0
        self.generator = np.random.RandomState(3)
        self.order = self.generator.permutation(size)

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            if self.at == self.size:
                self.at, self.order = 0, self.generator.permutation(self.size)
            self.at += 1
            yield int(self.order[self.at - 1])


@script()
def sampler_that_goes_on_where_it_stood(accelerator):
    """A sampler has a state of its own, and epochs are shorter than the data."""
    x, y = points()
    data = DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=Ongoing(len(x), 3 * BATCH))
    model, optimizer, batches = start(accelerator, data=data)
    return fit(accelerator, model, optimizer, batches, epochs=4)


@script()
def weighted_sampler_of_the_global_state(accelerator):
    """``WeightedRandomSampler`` without a generator, which draws from torch's global state."""
    x, y = points()
    sampler = WeightedRandomSampler(torch.arange(float(len(x))) + 1, 3 * BATCH)
    data = DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=sampler)
    model, optimizer, batches = start(accelerator, data=data)
    torch.manual_seed(5)
    return fit(accelerator, model, optimizer, batches, epochs=3)


class Augmented(Dataset):
    """Adds noise that numpy draws by the index, once a worker has switched the samples on."""

    def __init__(self):
        self.x, self.y = points()
        self.scale = 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        drawn = np.random.default_rng(index).normal(scale=0.1, size=FEATURES)
        return self.x[index] * self.scale + torch.from_numpy(drawn).float(), self.y[index]


def open_in_worker(number):
    np.random.seed(number)
    torch.utils.data.get_worker_info().dataset.scale = 1.0


@script()
def data_set_opened_by_worker_init_fn(accelerator):
    """``worker_init_fn`` seeds numpy and writes to the worker's data set."""
    settings = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": open_in_worker}
    data = DataLoader(Augmented(), batch_size=BATCH, **settings)
    model, optimizer, batches = start(accelerator, data=data)
    return fit(accelerator, model, optimizer, batches)


def replay(accelerator, part):
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    (x, y), generator = points(), np.random.RandomState(4)
    priorities, losses = np.ones(len(x)), []
    for _ in range(6):
        mine = part(torch.as_tensor(generator.choice(len(x), BATCH, p=priorities / priorities.sum())))
        each = F.cross_entropy(model(x[mine]), y[mine], reduction="none")
        loss = each.mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        found = accelerator.gather(each.detach())
        optimizer.step()
        losses.append(mean(accelerator, loss))
        priorities[accelerator.gather(mine).numpy()] = found.numpy()
    return result(accelerator, losses, model=model)


@script()
def replay_by_priorities(accelerator):
    """A replay memory with priorities: all ranks draw one batch, each takes its part, losses of rows are gathered."""
    return replay(accelerator, lambda drawn: drawn[accelerator.process_index :: accelerator.num_processes])


@script(follows="replay_by_priorities")
def replay_of_whole_batches(accelerator):
    """The same, where each process takes all of what is drawn."""
    return replay(accelerator, lambda drawn: drawn)


# ---- models ----------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A code of each sample, and what is made of it; ``(B,) -> (B, F)``."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(4 * BATCH, 4)
        self.net = Net(4, FEATURES)

    def forward(self, index):
        return self.net(self.codes(index))


@script()
def codes_of_samples_and_their_decoder(accelerator):
    """Each sample has a code; codes and decoder have an optimizer each, which step in turn."""
    model = build(Decoder)
    codes = torch.optim.SGD(model.codes.parameters(), lr=2.0)
    decoder = torch.optim.SGD(model.net.parameters(), lr=RATE)
    model, codes, decoder, batches = accelerator.prepare(
        model, codes, decoder, loader(torch.arange(4 * BATCH), points()[0])
    )
    losses = []
    for _ in range(2):
        for index, x in batches:
            for optimizer in (codes, decoder):
                loss = F.mse_loss(model(index), x)
                codes.zero_grad()
                decoder.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Following(Net):
    """A teacher inside of the model follows its body in each forward in training."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            if self.training:
                for its, own in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                    its.lerp_(own, 0.2)
            goal = self.teacher(x)
        hidden = self.body(x)
        return self.head(hidden), (hidden - goal).pow(2).mean(1)


@script()
def teacher_that_follows_in_forward(accelerator):
    """A teacher that is a moving average is a part of the model, and is moved by its forward."""
    model, optimizer, batches = start(accelerator, Following)

    def loss_of(model, x, y):
        logits, apart = model(x)
        return F.cross_entropy(logits, y) + apart.mean()

    return fit(accelerator, model, optimizer, batches, loss_of)


class Followed(Following):
    """The same, where the forward leaves the teacher as it is; ``(B, F) -> (B, C), (B,)``."""

    def forward(self, x):
        with torch.no_grad():
            goal = self.teacher(x)
        hidden = self.body(x)
        return self.head(hidden), (hidden - goal).pow(2).mean(1)


@script(follows="teacher_that_follows_in_forward")
def teacher_that_follows_after_the_step(accelerator):
    """The same teacher, which the script moves after each step."""
    model, optimizer, batches = start(accelerator, Followed)
    losses = []
    for x, y in batches:
        logits, apart = model(x)
        loss = F.cross_entropy(logits, y) + apart.mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for its, own in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
                its.lerp_(own, 0.2)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


# ---- meta-learning ---------------------------------------------------------------------------------------------------


def reptile(accelerator, averaged):
    """Train on each task by plain steps, and move the weights towards the mean of where that led."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = points(8 * BATCH)
    tasks = loader(x.view(BATCH, 8, FEATURES), y.view(BATCH, 8))
    model, optimizer, batches, rest = accelerator.prepare(model, optimizer, tasks, loader(*points(seed=7)))
    for _ in range(2):
        for xs, ys in batches:
            before = [each.detach().clone() for each in model.parameters()]
            moved = [torch.zeros_like(each) for each in before]
            for a, b in zip(xs, ys, strict=True):
                for _ in range(2):
                    with accelerator.no_sync(model):
                        gradients = torch.autograd.grad(F.cross_entropy(model(a), b), list(model.parameters()))
                    with torch.no_grad():
                        for each, gradient in zip(model.parameters(), gradients, strict=True):
                            each.sub_(gradient, alpha=0.1)
                with torch.no_grad():
                    for each, was, by in zip(model.parameters(), before, moved, strict=True):
                        by.add_(each - was, alpha=1 / len(xs))
                        each.copy_(was)
            with torch.no_grad():
                for each, by in zip(model.parameters(), moved, strict=True):
                    each.add_(averaged(by), alpha=0.5)
    return fit(accelerator, model, optimizer, rest)


@script()
def reptile_by_each_process(accelerator):
    """Reptile: tasks are shared out, and the weights move towards the mean over the tasks of one process."""
    return reptile(accelerator, lambda by: by)


@script(follows="reptile_by_each_process")
def reptile_over_all_processes(accelerator):
    """The same, where ``accelerator.reduce(values, "mean")`` averages how far the tasks of all have moved weights."""
    return reptile(accelerator, lambda by: accelerator.reduce(by, "mean"))


@script(follows="reptile_by_each_process reptile_over_all_processes")
def reptile_of_one_task_at_a_time(accelerator):
    """Reptile where all processes train on the same task, of which each has some rows."""
    model, optimizer, tasks = start(accelerator)
    losses = []
    for x, y in tasks:
        before = [each.detach().clone() for each in model.parameters()]
        for _ in range(2):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
        with torch.no_grad():
            for each, was in zip(model.parameters(), before, strict=True):
                each.copy_(was.lerp(each, 0.5))
    return result(accelerator, losses, model=model)
