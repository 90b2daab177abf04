"""Five folds, each with its own model, one accelerator; the folds' predictions on the test set are averaged."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from drivetrain import Accelerator, release_memory
from drivetrain.utils import set_seed


def main(args):
    accelerator = Accelerator(split_batches=args.split_batches)
    set_seed(5)
    x = torch.randn(100, 8)
    y = (x[:, 0] + x[:, 1] > 0).long()
    train, test = TensorDataset(x[:75], y[:75]), TensorDataset(x[75:], y[75:])
    test_predictions, fold_scores = [], []
    for fold in range(args.num_folds):
        held = set(range(fold, 75, args.num_folds))
        set_seed(100 + fold)
        train_loader = DataLoader(
            Subset(train, [i for i in range(75) if i not in held]), batch_size=args.batch_size, shuffle=True
        )
        valid_loader = DataLoader(Subset(train, sorted(held)), batch_size=4)
        test_loader = DataLoader(test, batch_size=4)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        model, optimizer, train_loader, valid_loader, test_loader = accelerator.prepare(
            model, optimizer, train_loader, valid_loader, test_loader
        )
        for _ in range(args.num_epochs):
            model.train()
            for inputs, targets in train_loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        hits, samples_seen = 0, 0
        with torch.inference_mode():
            for inputs, targets in valid_loader:
                predictions, references = accelerator.gather_for_metrics((model(inputs).argmax(-1), targets))
                hits += (predictions == references).sum().item()
                samples_seen += references.shape[0]
            fold_scores.append(hits / samples_seen)
            fold_predictions = []
            for inputs, _ in test_loader:
                fold_predictions.append(accelerator.gather_for_metrics(model(inputs)).cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        if fold % 2:
            model, optimizer, train_loader = release_memory(model, optimizer, train_loader)
            accelerator.free_memory()
    predictions = torch.stack(test_predictions).sum(dim=0).div(args.num_folds)
    accuracy = (predictions.argmax(-1) == y[75:]).float().mean().item()
    accelerator.end_training()
    return {"folds": fold_scores, "predictions": predictions.tolist(), "accuracy": accuracy}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--split_batches", action="store_true")
    parser.add_argument("--num_folds", type=int, default=3)
    parser.add_argument("--num_epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=12)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
