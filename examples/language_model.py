"""Train a small GPT on bytes: the source of Python's standard library, which is on every machine.

    drivetrain launch --config examples/ddp.yaml examples/language_model.py

The same file runs under every backend, under `python` and under `torchrun`; `--resume` continues a run that was
stopped, on any backend and any number of processes.

Shapes: B sequences, T positions, C channels, H heads, V = 256 byte values.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import ProjectConfiguration, set_seed

from reporting import Progress, Report, fresh_directory


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.norm_mlp = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x_BTC: Tensor) -> Tensor:
        heads_BHTC = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x_BTC)).chunk(3, dim=-1)
        ]
        attended_BHTC = F.scaled_dot_product_attention(*heads_BHTC, is_causal=True)
        x_BTC = x_BTC + self.out(attended_BHTC.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm_mlp(x_BTC))


class GPT(nn.Module):
    """Bytes in (B, T), scores of the next byte out (B, T, V)."""

    def __init__(self, context: int, channels: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, channels)
        self.positions = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.scores = nn.Linear(channels, 256, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.bytes(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.scores(self.norm(x_BTC))


def make_data(kilobytes: int, context: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows of `context + 1` bytes from the head of the library, files by name; every 16th is for testing."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= kilobytes * 1024:
            break
    count = min(len(text), kilobytes * 1024) // (context + 1)
    windows = torch.frombuffer(text, dtype=torch.uint8)[: count * (context + 1)].view(count, context + 1).long()
    test = torch.arange(count) % 16 == 0
    return TensorDataset(windows[~test]), TensorDataset(windows[test])


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross entropy in nats of each next byte, (B, T)."""
    scores_BTV = model(windows[:, :-1])
    return F.cross_entropy(scores_BTV.transpose(1, 2), windows[:, 1:], reduction="none")


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Bits per byte over the test windows, each counted once. Collective."""
    model.eval()
    losses = [accelerator.gather_for_metrics(next_byte_loss(model, windows).mean(dim=1)) for (windows,) in loader]
    return torch.cat(losses).mean().item() / math.log(2)


def main() -> None:
    """Train, and test after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kilobytes", type=int, default=512, help="how much of the library to read")
    parser.add_argument("--context", type=int, default=128, help="bytes that a guess may look back")
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="windows in one forward of one process")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in one optimizer update")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--resume", nargs="?", const="latest", help="continue: from the latest checkpoint, or this one")
    args = parser.parse_args()

    set_seed(args.seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulate,
        project_config=ProjectConfiguration(str(args.output), automatic_checkpoint_naming=True, total_limit=3),
    )
    if not args.resume:
        fresh_directory(accelerator, args.output)

    train_data, test_data = make_data(args.kilobytes, args.context)
    train_loader, test_loader = accelerator.prepare(
        DataLoader(train_data, batch_size=args.batch_size, shuffle=True),
        DataLoader(test_data, batch_size=32),
    )
    updates = args.epochs * math.ceil(len(train_loader) / args.accumulate)
    model = GPT(args.context, args.channels, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates, pct_start=0.1)
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
        for (windows,) in train_loader:
            with accelerator.accumulate(model):
                loss = next_byte_loss(model, windows).mean()
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
        bits = evaluate(accelerator, model, test_loader)
        report.log(progress.update, bits_per_byte=bits)
        accelerator.print(f"epoch {progress.epoch} of {args.epochs}: {bits:.3f} bits per byte")
        checkpoint = accelerator.save_state()

    report.close("GPT on the standard library", "bits_per_byte")
    accelerator.print(f"bits per byte: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.print(f"checkpoint:    {checkpoint}")
    accelerator.print(f"picture:       {report.picture}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
