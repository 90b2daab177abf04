"""Two models, two optimizers, one loop: a generator of points on a circle against a discriminator."""

from __future__ import annotations

import argparse
import itertools
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import set_seed


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.3)
        nn.init.zeros_(module.bias)


def main(args):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    device = accelerator.device
    set_seed(21)
    angles = torch.rand(96) * 2 * math.pi
    points = torch.stack((angles.cos(), angles.sin()), dim=1)
    noise = torch.randn(96, 4)
    loader = DataLoader(TensorDataset(points, noise), batch_size=args.batch_size, shuffle=True)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, loader
    )
    criterion = nn.BCEWithLogitsLoss()
    log = []
    for _ in range(args.num_epochs):
        for real, z in loader:
            ones = torch.ones(len(real), 1, device=device)
            zeros = torch.zeros(len(real), 1, device=device)
            # Discriminator: one batch of real points, one of false ones, a backward for each.
            discriminator.zero_grad()
            loss_real = criterion(discriminator(real), ones)
            accelerator.backward(loss_real)
            fake = generator(z)
            loss_fake = criterion(discriminator(fake.detach()), zeros)
            accelerator.backward(loss_fake)
            accelerator.clip_grad_value_(discriminator.parameters(), 1.0)
            optimizer_d.step()
            # Generator, through a discriminator whose gradients are thrown away.
            generator.zero_grad()
            loss_g = criterion(discriminator(fake), ones)
            accelerator.backward(loss_g)
            optimizer_g.step()
            losses = accelerator.gather(torch.stack([(loss_real + loss_fake).detach(), loss_g.detach()])[None])
            log.append(losses.float().mean(0).tolist())
    both = itertools.chain(generator.parameters(), discriminator.parameters())
    weights = torch.cat([parameter.detach().float().flatten() for parameter in both]).tolist()
    with torch.no_grad():
        sample = generator(torch.ones(1, 4, device=device)).float()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"log": log, "weights": weights, "sample": sample.tolist()}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
