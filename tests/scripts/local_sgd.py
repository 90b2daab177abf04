"""Train replicas apart and average them every few steps."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.local_sgd import LocalSGD
from drivetrain.utils import set_seed


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    if accelerator.distributed_type not in ["ddp", "single"] and accelerator.num_processes > 1:
        raise NotImplementedError("LocalSGD needs replicas")
    set_seed(3)
    x = torch.randn(64, 5)
    y = x @ torch.randn(5, 1)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    spread = []
    for _ in range(args.num_epochs):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps, enabled=True
        ) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    local_sgd.step()
                weights = accelerator.gather(model.weight.detach())
                spread.append((weights.max(dim=0).values - weights.min(dim=0).values).max().item())
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    loss = nn.functional.mse_loss(x @ weights[0], y[:, 0]).item()
    accelerator.end_training()
    return {"spread": spread, "equal": bool((weights == weights[:1]).all()), "loss": loss}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_sgd_steps", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
