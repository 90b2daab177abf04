"""A language model whose loss is normalised by hand: by the tokens of a whole window, on all processes."""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.utils import set_seed

VOCABULARY = 23


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def collate(rows):
    longest = max(len(row) for row in rows)
    labels = torch.full((len(rows), longest), -100)
    for line, row in zip(labels, rows, strict=True):
        line[: len(row)] = row
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(7)
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(1, VOCABULARY, (int(torch.randint(2, 11, (), generator=generator)),), generator=generator)
        for _ in range(args.num_rows)
    ]
    dataloader = DataLoader(rows, batch_size=args.batch_size, collate_fn=collate, shuffle=True)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    # How many processes see batches of their own: fewer than num_processes where some of them share a model.
    num_shares = len(accelerator.gather(torch.zeros(1, device=accelerator.device)))
    losses = []
    for _ in range(args.num_epochs):
        model.train()
        iterator = iter(dataloader)
        remainder = len(dataloader) % args.gradient_accumulation_steps
        remainder = remainder if remainder else args.gradient_accumulation_steps
        updates = -(-len(dataloader) // args.gradient_accumulation_steps)
        for update in range(updates):
            batches = [
                next(iterator) for _ in range(remainder if update == updates - 1 else args.gradient_accumulation_steps)
            ]
            num_items = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in batches)
            num_items = accelerator.gather(num_items).sum().item()
            total = torch.zeros((), device=accelerator.device)
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                quiet = model.no_sync if args.use_model_no_sync else lambda: accelerator.no_sync(model)
                context = contextlib.nullcontext() if last or accelerator.num_processes == 1 else quiet()
                with context:
                    logits = model(batch["input_ids"])
                    loss = loss_fn(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
                    total += loss.detach()
                    # Mean over processes and division by the window's length, undone.
                    loss = loss * args.gradient_accumulation_steps * num_shares / num_items
                    accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(total, reduction="sum").item() / num_items)
    unwrapped = accelerator.unwrap_model(model)
    weight = unwrapped.state_dict()["head.weight"] if args.weights_of_state else unwrapped.head.weight
    weights = weight.detach().flatten().tolist()
    accelerator.end_training()
    return {"losses": losses, "weights": weights, "lr": lr_scheduler.get_last_lr()}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--num_rows", type=int, default=80)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--use_model_no_sync", action="store_true")
    parser.add_argument("--weights_of_state", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
