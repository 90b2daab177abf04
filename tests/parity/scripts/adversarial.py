"""Two models against each other, each with its optimizer."""

from __future__ import annotations

import torch
from parity_common import BATCH, FEATURES, build, loader, mean, noise, points, result, script
from torch import nn
from torch.nn import functional as F


def generator_and_critic():
    generator = build(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, FEATURES)))
    critic = build(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2)
    return generator, critic


def real_and_noise():
    return loader(points()[0], noise(4 * BATCH, 4))


@script()
def gan(accelerator):
    """A GAN: two models, two optimizers, three backwards in a step."""
    generator, critic = generator_and_critic()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=0.01)
    generator, critic, optimizer_g, optimizer_d, batches = accelerator.prepare(
        generator, critic, optimizer_g, optimizer_d, real_and_noise()
    )
    losses = []
    for real, z in batches:
        one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(z)
        optimizer_d.zero_grad()
        loss_d = F.binary_cross_entropy_with_logits(critic(real), one)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(critic(fake.detach()), zero)
        accelerator.backward(loss_d)
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(critic(fake), one)
        accelerator.backward(loss_g)
        optimizer_g.step()
        losses += [mean(accelerator, loss_d), mean(accelerator, loss_g)]
    return result(accelerator, losses, generator=generator, critic=critic)


@script()
def wgan_clamp(accelerator):
    """A Wasserstein GAN, whose critic's weights are clamped after each of its steps."""
    generator, critic = generator_and_critic()
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=0.005)
    optimizer_d = torch.optim.RMSprop(critic.parameters(), lr=0.005)
    generator, critic, optimizer_g, optimizer_d, batches = accelerator.prepare(
        generator, critic, optimizer_g, optimizer_d, real_and_noise()
    )
    losses = []
    for real, z in batches:
        with torch.no_grad():
            fake = generator(z)
        loss_d = critic(fake).mean() - critic(real).mean()
        optimizer_d.zero_grad()
        accelerator.backward(loss_d)
        optimizer_d.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        loss_g = -critic(generator(z)).mean()
        optimizer_g.zero_grad()
        accelerator.backward(loss_g)
        optimizer_g.step()
        losses += [mean(accelerator, loss_d), mean(accelerator, loss_g)]
    return result(accelerator, losses, generator=generator, critic=critic)


@script()
def weights_clamped(accelerator):
    """One model whose weights are clamped after each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


@script()
def gradient_penalty(accelerator):
    """A critic whose slope at mixed points is held at 1: gradients of gradients."""
    _, critic = generator_and_critic()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    data = loader(points()[0], noise(4 * BATCH, FEATURES), torch.linspace(0, 1, 4 * BATCH)[:, None])
    critic, optimizer, batches = accelerator.prepare(critic, optimizer, data)
    losses = []
    for real, fake, share in batches:
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, critic=critic)


@script()
def gan_critic_frozen(accelerator):
    """A GAN whose critic is frozen by ``requires_grad_(False)`` while the generator learns."""
    generator, critic = generator_and_critic()
    optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    optimizer_d = torch.optim.SGD(critic.parameters(), lr=0.1)
    generator, critic, optimizer_g, optimizer_d, batches = accelerator.prepare(
        generator, critic, optimizer_g, optimizer_d, real_and_noise()
    )
    losses = []
    for real, z in batches:
        critic.requires_grad_(True)
        optimizer_d.zero_grad()
        loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(z).detach())).mean()
        accelerator.backward(loss_d)
        optimizer_d.step()
        critic.requires_grad_(False)
        optimizer_g.zero_grad()
        loss_g = F.softplus(-critic(generator(z))).mean()
        accelerator.backward(loss_g)
        optimizer_g.step()
        losses += [mean(accelerator, loss_d), mean(accelerator, loss_g)]
    return result(accelerator, losses, generator=generator, critic=critic)


class Reversed(torch.autograd.Function):
    """Gives gradients back with the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Domains(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.classes, self.domain = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        features = self.body(x)
        return self.classes(features), self.domain(Reversed.apply(features)).squeeze(-1)


@script()
def gradient_reversal(accelerator):
    """Domain adaptation: an autograd function in forward turns gradients round."""
    model = build(Domains)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = points()
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(x, y, (torch.arange(len(x)) % 2).float()))
    losses = []
    for x, y, domain in batches:
        logits, guess = model(x)
        loss = F.cross_entropy(logits, y) + F.binary_cross_entropy_with_logits(guess, domain)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)


class Potential(nn.Module):
    """An energy, and its forces: the negative derivative by the positions; ``(B, F) -> (B,), (B, F)``."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.body(positions).squeeze(1)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -slope


@script()
def forces_of_a_potential(accelerator):
    """An interatomic potential: forward differentiates the energy, and the loss compares energies and forces."""
    model = build(Potential)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = loader(noise(48, FEATURES, seed=2), noise(48, seed=3), noise(48, FEATURES, seed=4))
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for positions, energy, forces in data:
        found, pulled = model(positions)
        loss = F.mse_loss(found, energy) + F.mse_loss(pulled, forces)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean(accelerator, loss))
    return result(accelerator, losses, model=model)
