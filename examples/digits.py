"""Recognise handwritten digits: 1,797 real images that come with scikit-learn, and a small convolutional net.

    drivetrain launch --config examples/ddp.yaml examples/digits.py

The same file runs under every backend, under `python` and under `torchrun`; `--resume` continues a run that was
stopped, on any backend and any number of processes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import ProjectConfiguration, set_seed

from reporting import Progress, Report, fresh_directory

TEST_IMAGES = 357
"""Leaves 1,440 for training: no batch has to be filled up, so every number of processes follows one loss curve."""


def make_model() -> nn.Module:
    """Two convolutions and a linear layer: 8 x 8 grey images in, 10 scores out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """The images, split into training and test by a fixed shuffle."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Share of the test images that are recognised, each counted once. Collective."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        guesses, truth = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        correct += int((guesses == truth).sum())
        total += len(truth)
    return correct / total


def main() -> None:
    """Train, and test after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=16, help="images in one forward of one process")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in one optimizer update")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    parser.add_argument("--resume", nargs="?", const="latest", help="continue: from the latest checkpoint, or this one")
    args = parser.parse_args()

    set_seed(args.seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate,
        project_config=ProjectConfiguration(str(args.output), automatic_checkpoint_naming=True, total_limit=3),
    )
    if not args.resume:
        fresh_directory(accelerator, args.output)

    train_data, test_data = make_data()
    train_loader, test_loader = accelerator.prepare(
        DataLoader(train_data, batch_size=args.batch_size, shuffle=True),
        DataLoader(test_data, batch_size=60),
    )
    updates = args.epochs * math.ceil(len(train_loader) / args.accumulate)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    progress = Progress(updates)
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(None if args.resume == "latest" else args.resume)
        progress.check(updates)
    report = Report(accelerator, args.output, updates, progress.update)

    checkpoint = args.output / "checkpoints"
    for epoch in range(progress.epoch, args.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update += 1
                report.log(progress.update, loss=accelerator.reduce(loss.detach(), "mean").item())

        progress.epoch = epoch + 1
        accuracy = evaluate(accelerator, model, test_loader)
        report.log(progress.update, accuracy=accuracy)
        accelerator.print(f"epoch {progress.epoch:2d} of {args.epochs}: test accuracy {accuracy:.2%}")
        checkpoint = accelerator.save_state()

    report.close("handwritten digits", "accuracy")
    accelerator.print(f"test accuracy: {evaluate(accelerator, model, test_loader):.2%}")
    accelerator.print(f"checkpoint:    {checkpoint}")
    accelerator.print(f"picture:       {report.picture}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
