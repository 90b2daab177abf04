"""Whole runs: windows by hand, samplers, metrics that decide, several models, reinforcement learning."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque

import torch
from parity_common import BATCH, CLASSES, FEATURES, Net, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def sgd(model, lr=0.3, **more):
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def start(accelerator, kind=Net, lr=0.3, data=None, **more):
    model = build(kind)
    return accelerator.prepare(model, sgd(model, lr, **more), loader() if data is None else data)


def step_on(accelerator, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return mean(accelerator, loss)


def state_of(model, name="model"):
    return {f"{name}.{key}": value for key, value in model.state_dict().items()}


@script()
def window_by_hand_with_rest(accelerator):
    """``loss / 3`` and a step every third batch by the script, and a step of what is left at the end of each epoch."""
    model, optimizer, batches = start(accelerator)
    losses = []
    for _ in range(2):
        for number, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss / 3)
            losses.append(mean(accelerator, loss))
            if (number + 1) % 3 == 0 or number + 1 == len(batches):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return result(accelerator, losses, model=model)


def _uneven(windows, epochs=2, size=5 * BATCH, momentum=0.9):
    model = build()
    optimizer = sgd(model, momentum=momentum)
    x, y = points(size)
    for _ in range(epochs):
        for first in range(0, size, windows * BATCH):
            loss = F.cross_entropy(model(x[first : first + windows * BATCH]), y[first : first + windows * BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [], state_of(model)


@script(reference=lambda: _uneven(2, size=41), gradient_accumulation_steps=2)
def windows_and_a_short_batch(accelerator):
    """``accumulate`` over two batches, the last of which is short."""
    model, optimizer, batches = start(accelerator, data=loader(*points(41)), momentum=0.9)
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return result(accelerator, [], model=model)


@script()
def weighted_sampler(accelerator):
    """``WeightedRandomSampler`` with a generator of its own."""
    x, y = points()
    sampler = torch.utils.data.WeightedRandomSampler(
        torch.arange(1.0, len(x) + 1), 4 * BATCH, generator=torch.Generator().manual_seed(7)
    )
    data = DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=sampler)
    model, optimizer, batches = start(accelerator, data=data)
    losses = [step_on(accelerator, model, optimizer, x, y) for _ in range(2) for x, y in batches]
    return result(accelerator, losses, model=model)


class Bucketed:
    """A batch sampler that sorts by length and shuffles its batches anew in each epoch."""

    def __init__(self, lengths, size):
        self.order = sorted(range(len(lengths)), key=lambda n: (lengths[n], n))
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.order) // self.size

    def __iter__(self):
        batches = [self.order[n : n + self.size] for n in range(0, len(self.order), self.size)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)


@script()
def buckets_of_lengths(accelerator):
    """A batch sampler that groups by length, with ``set_epoch``."""
    x, y = points()
    sampler = Bucketed([n * 7 % 13 for n in range(len(x))], BATCH)
    model, optimizer, batches = start(accelerator, data=DataLoader(TensorDataset(x, y), batch_sampler=sampler))
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses += [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
    return result(accelerator, losses, model=model)


@script()
def stopped_by_a_metric(accelerator):
    """Accuracy by ``gather_for_metrics`` decides when to stop; the best weights are kept and loaded at the end."""
    model, optimizer, batches = start(accelerator, lr=1.0)
    held_out = accelerator.prepare(loader(*points(29, seed=9)))
    best, kept, patience, losses = -1.0, None, 2, []
    for _ in range(5):
        losses += [step_on(accelerator, model, optimizer, x, y) for x, y in batches]
        model.eval()
        right = count = 0
        for x, y in held_out:
            with torch.no_grad():
                answers, goals = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right, count = right + int((answers == goals).sum()), count + len(goals)
        model.train()
        losses.append(right / count)
        if right / count > best:
            best, patience = right / count, 2
            kept = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
        else:
            patience -= 1
        if patience == 0:
            break
    model.load_state_dict(kept)
    return result(accelerator, losses, model=model)


@script()
def continued_by_torch_save(accelerator):
    """Model, optimizer and scheduler through ``torch.save``; new objects load them after ``prepare`` and go on."""

    def make():
        model = build(seed=7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return accelerator.prepare(model, optimizer, scheduler)

    def epoch():
        for x, y in batches:
            losses.append(step_on(accelerator, model, optimizer, x, y))
            scheduler.step()

    batches, losses = accelerator.prepare(loader()), []
    model, optimizer, scheduler = make()
    epoch()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "losses": losses,
    }
    file = f"{accelerator.project_dir}/continued-{accelerator.process_index}.pt"
    torch.save(state, file)
    found = torch.load(file, weights_only=False)
    model, optimizer, scheduler = make()
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    epoch()
    return result(accelerator, losses, model=model)


@script()
def momentum_contrast(accelerator):
    """MoCo: a key encoder that follows by momentum, and a queue of gathered keys."""
    model = build()
    keys = copy.deepcopy(model).requires_grad_(False)
    queue = F.normalize(noise(2 * BATCH, CLASSES, seed=6), dim=1)
    x, _ = points()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(x, x + 0.1 * noise(*x.shape)))
    losses, place = [], 0
    for x, near in batches:
        q = F.normalize(model(x), dim=1)
        with torch.no_grad():
            for mine, p in zip(keys.parameters(), model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(p.data, alpha=0.1)
            k = F.normalize(keys(near), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.5
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        found = accelerator.gather(k)
        queue[place : place + len(found)] = found
        place = (place + len(found)) % len(queue)
        losses.append(mean(accelerator, loss))
    losses, weights = result(accelerator, losses, model=model)
    return losses, weights | {"queue": queue}


@script()
def q_learning(accelerator):
    """DQN: a replay memory of the script, double targets, a target net that follows softly."""
    model, target = build(), build().requires_grad_(False)
    model, target, optimizer = accelerator.prepare(model, target, torch.optim.Adam(model.parameters(), lr=0.02))
    memory, draw = deque(maxlen=60), random.Random(3)
    (x, y), after = points(72), noise(72, FEATURES)
    losses = []
    for step in range(6):
        for n in range(12 * step, 12 * step + 12):
            with torch.no_grad():
                action = int(model(x[n : n + 1]).argmax()) if draw.random() > 0.3 else draw.randrange(CLASSES)
            memory.append((x[n], action, float(action == y[n]), after[n]))
        drawn = draw.sample(memory, BATCH)
        states, actions, rewards, later = (list(column) for column in zip(*drawn, strict=True))
        states, later = torch.stack(states), torch.stack(later)
        with torch.no_grad():
            best = model(later).argmax(1, keepdim=True)
            goal = torch.tensor(rewards) + 0.9 * target(later).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(model(states).gather(1, torch.tensor(actions)[:, None])[:, 0], goal)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.data.copy_(0.1 * p.data + 0.9 * t.data)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model, target=target)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x):
        found = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(found)), self.critic(found)[:, 0]


@script()
def proximal_policy(accelerator):
    """PPO: several epochs of clipped updates over one rollout, with a value loss and a bonus for entropy."""
    x, y = points()
    model = build(ActorCritic)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    with torch.no_grad():
        policy, values = model(x)
        actions = torch.arange(len(x)) % CLASSES
        old = policy.log_prob(actions)
    rewards = (actions == y).float()
    batches = accelerator.prepare(loader(x, actions, old, rewards, rewards - values))
    losses = []
    for _ in range(2):
        for x, actions, old, rewards, gain in batches:
            policy, values = model(x)
            ratio = (policy.log_prob(actions) - old).exp()
            surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = -surrogate + 0.5 * F.mse_loss(values, rewards) - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def cycle_of_generators(accelerator):
    """CycleGAN: two generators under one optimizer by ``itertools.chain``, two critics under another."""

    def generator():
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, FEATURES))

    def critic():
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    there, back, first, second = (
        build(kind, seed) for kind, seed in ((generator, 1), (generator, 2), (critic, 3), (critic, 4))
    )
    g = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), lr=0.01)
    d = torch.optim.Adam(itertools.chain(first.parameters(), second.parameters()), lr=0.01)
    x, _ = points()
    there, back, first, second, g, d, batches = accelerator.prepare(
        there, back, first, second, g, d, loader(x, noise(*x.shape) + 1)
    )

    def set_grad(wanted):
        for net in (first, second):
            for p in net.parameters():
                p.requires_grad = wanted

    losses = []
    for a, b in batches:
        fake_b, fake_a = there(a), back(b)
        set_grad(False)
        g.zero_grad()
        loss = (second(fake_b) - 1).pow(2).mean() + (first(fake_a) - 1).pow(2).mean()
        loss = loss + F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b)
        accelerator.backward(loss)
        g.step()
        set_grad(True)
        d.zero_grad()
        loss_d = (second(b) - 1).pow(2).mean() + second(fake_b.detach()).pow(2).mean()
        loss_d = loss_d + (first(a) - 1).pow(2).mean() + first(fake_a.detach()).pow(2).mean()
        accelerator.backward(loss_d)
        d.step()
        losses += [mean(accelerator, loss), mean(accelerator, loss_d)]
    return result(accelerator, losses, there=there, back=back, first=first, second=second)


@script()
def conditional_branches(accelerator):
    """Early exits: the loss of a step takes one of three exits of the model, later layers then have no gradient."""

    class Exits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
            self.heads = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(3)])

        def forward(self, x, depth):
            for layer in self.layers[: depth + 1]:
                x = torch.tanh(layer(x))
            return self.heads[depth](x)

    model = build(Exits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for _ in range(2):
        for step, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x, step % 3), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def divided_by_the_batch_size(accelerator):
    """A sum over the batch, divided by the batch size that the script gave its loader."""
    model, optimizer, batches = start(accelerator, lr=0.03)
    for x, y in batches:
        loss = (model(x)[:, 0] - y).pow(2).sum() / BATCH
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return result(accelerator, [], model=model)
