"""An endless-looking stream of samples, epochs that differ in length between processes, a plateau scheduler."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.utils import set_seed


class Stream(IterableDataset):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(50 + self.epoch)
        for index in range(self.count):
            x = torch.randn(4, generator=generator)
            yield {"x": x, "y": x.sum(0, keepdim=True), "id": index}


def main(args):
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(dispatch_batches=args.dispatch_batches, split_batches=True)
    )
    set_seed(13)
    stream = Stream(args.count)
    loader = DataLoader(stream, batch_size=8)
    uneven = DataLoader(TensorDataset(torch.arange(18.0).view(9, 2)), batch_size=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    head = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.1, patience=1, threshold=args.threshold)
    model, optimizer, loader, scheduler, head, head_optimizer, uneven = accelerator.prepare(
        model, optimizer, loader, scheduler, head, head_optimizer, uneven
    )
    seen, rates, losses = [], [], []
    for epoch in range(args.num_epochs):
        stream.set_epoch(epoch)
        total, count, ids = 0.0, 0, []
        for batch in loader:
            prediction = model(batch["x"])
            loss = nn.functional.mse_loss(prediction, batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            each = (prediction.detach() - batch["y"]).pow(2).squeeze(1)
            gathered = accelerator.gather_for_metrics({"error": each, "id": batch["id"]})
            total += gathered["error"].sum().item()
            count += len(gathered["error"])
            ids += gathered["id"].tolist()
        seen.append(ids)
        losses.append(total / count)
        scheduler.step(losses[-1])
        rates.append(optimizer.param_groups[0]["lr"])
    batches = 0
    with accelerator.join_uneven_inputs([head], even_batches=False):
        for (x,) in uneven:
            batches += 1
            accelerator.backward(head(x).mean())
            head_optimizer.step()
            head_optimizer.zero_grad()
    weights = accelerator.gather(head.weight.detach())
    result = {
        "seen": seen,
        "losses": losses,
        "rates": rates,
        "batches": batches,
        "agree": bool((weights == weights[0]).all()),
        "rows": accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True),
    }
    accelerator.end_training()
    return result


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=44)
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--threshold", type=float, default=1e-4)
    parser.add_argument("--dispatch_batches", action="store_true", default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
