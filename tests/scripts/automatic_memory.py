"""Find the largest batch size that fits, then train with it; stop early when the loss is low enough."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import find_executable_batch_size, set_seed


class EarlyStopping:
    def __init__(self, patience=3):
        self.patience, self.counter, self.best = patience, 0, None

    def check(self, loss):
        if self.best is None or loss < self.best - 1e-3:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
        return self.counter >= self.patience


def main(args):
    accelerator = Accelerator(cpu=args.cpu)
    tried, steps = [], 0
    set_seed(11)
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1)

    @find_executable_batch_size(starting_batch_size=args.starting_batch_size)
    def training_loop(batch_size):
        nonlocal steps
        accelerator.free_memory()
        set_seed(11)
        tried.append(batch_size)
        model = nn.Linear(6, 1).to(accelerator.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
        if batch_size > args.fits:
            raise torch.OutOfMemoryError("the accelerator is out of memory, pretends this script")
        lr_scheduler = OneCycleLR(optimizer, max_lr=0.3, epochs=args.num_epochs, steps_per_epoch=len(loader))
        model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
        stopping = EarlyStopping()
        for _ in range(args.num_epochs):
            model.train()
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                steps += 1
                # One process alone may see it; all must leave together.
                if stopping.check(loss.item()) and accelerator.is_last_process:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    return loss.item(), lr_scheduler.get_last_lr()[0]
        return loss.item(), lr_scheduler.get_last_lr()[0]

    loss, rate = training_loop()
    accelerator.end_training()
    return {"tried": tried, "steps": steps, "loss": loss, "lr": rate}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--starting_batch_size", type=int, default=32)
    parser.add_argument("--fits", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=40)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
