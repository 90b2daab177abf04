"""Classify sequences of tokens: tracking, checkpoints by epoch or by step, resume in the middle of an epoch.

Start with `python`, `torchrun` or `drivetrain launch`.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator, DistributedType
from drivetrain.logging import get_logger
from drivetrain.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__, log_level="INFO")

MAX_LENGTH = 12
VOCABULARY = 40


class Sentences(Dataset):
    """Label 1 when a sentence holds more high tokens than low ones; sentences differ in length."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, MAX_LENGTH + 1, (count,), generator=generator)
        self.rows = [torch.randint(1, VOCABULARY, (int(n),), generator=generator) for n in lengths]
        self.labels = [int((row >= VOCABULARY // 2).sum() * 2 > len(row)) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


class Config:
    def __init__(self, hidden=16):
        self.hidden = hidden
        self.num_labels = 2


class Classifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.hidden, padding_idx=0)
        self.LayerNorm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.LayerNorm(self.embed(input_ids)) * attention_mask.unsqueeze(-1)
        logits = self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def get_dataloaders(accelerator, batch_size):
    with accelerator.main_process_first():
        train, test = Sentences(150, 1), Sentences(57, 2)

    def collate(examples):
        longest = None
        if accelerator.distributed_type == DistributedType.XLA:
            longest = MAX_LENGTH
        longest = longest or max(len(example["input_ids"]) for example in examples)
        if accelerator.mixed_precision != "no":
            longest = (longest + 7) // 8 * 8
        ids = torch.zeros(len(examples), longest, dtype=torch.long)
        for row, example in zip(ids, examples, strict=True):
            row[: len(example["input_ids"])] = example["input_ids"]
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).float(),
            "labels": torch.tensor([example["labels"] for example in examples]),
        }

    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True)
    eval_dataloader = DataLoader(test, shuffle=False, collate_fn=collate, batch_size=16)
    return train_dataloader, eval_dataloader


def main(args):
    project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs"))
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with="tensorboard" if args.with_tracking else None,
        project_config=project,
    )
    logger.info(accelerator.state, main_process_only=False)
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)
    if args.with_tracking:
        run = os.path.split(__file__)[-1].split(".")[0]
        accelerator.init_trackers(run, vars(args))

    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    train_dataloader, eval_dataloader = get_dataloaders(accelerator, args.batch_size)
    model = Classifier(Config())
    model = model.to(accelerator.device)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=args.lr)
    per_epoch = len(train_dataloader) // accelerator.num_processes
    total = per_epoch * args.num_epochs // args.gradient_accumulation_steps
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * max(0.1, 1 - step / max(total, 1)))

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    # Prepared, the loader knows how many batches this process sees; processes may share a model.
    total = len(train_dataloader) * args.num_epochs // args.gradient_accumulation_steps
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        path = os.path.basename(args.resume_from_checkpoint)
        training_difference = os.path.splitext(path)[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
        else:
            resume_step = int(training_difference.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)

    history = []
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        total_loss = 0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            overall_step += starting_epoch * len(train_dataloader)
        for batch in active_dataloader:
            batch = {key: value.to(accelerator.device) for key, value in batch.items()}
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs["loss"]
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            history.append(accelerator.gather(loss.detach().float()).mean().item())
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))

        model.eval()
        correct = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs["logits"].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            seen += len(references)
        accuracy = correct / seen
        accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
        if args.with_tracking:
            accelerator.log(
                {"accuracy": accuracy, "train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch},
                step=epoch,
            )
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    accelerator.save(unwrapped_model.state_dict(), os.path.join(args.output_dir, "model.bin"))
    result = {
        "history": history,
        "accuracy": accuracy,
        "seen": seen,
        "lr": lr_scheduler.get_last_lr()[0],
        "group_lr": optimizer.param_groups[0]["lr"],
        "hidden": model.config.hidden,
        "weights": {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()},
    }
    accelerator.end_training()
    return result


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--checkpointing_steps", default=None, help="a number of steps, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
