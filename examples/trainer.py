"""Train a small Llama with Transformers' Trainer on bytes: the source of Python's standard library.

    drivetrain launch --config examples/fsdp.yaml examples/trainer.py

The same file runs under every backend; `--resume` continues the newest checkpoint, on any backend, with a `--batch`
whose product with the data-parallel processes is the one before. It needs `pip install "drivetrain[transformers]"`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain_transformers import Trainer, TrainingArguments

CONTEXT = 64
"""Bytes in a sample."""


class Source(Dataset[dict[str, Tensor]]):
    """Pieces of the standard library's source, one byte a token.

    Args:
        size: bytes to read.
        part: which of several such readings.
    """

    def __init__(self, size: int, part: int = 0) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= size * (part + 1):
                break
        self.pieces = torch.frombuffer(text, dtype=torch.uint8)[size * part :][:size].long().split(CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="runs/trainer", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=60, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=8, help="samples in an update of one data-parallel process")
    parser.add_argument("--resume", action="store_true", help="continue the newest checkpoint")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=3e-3,
        logging_steps=10,
        per_device_train_batch_size=options.batch,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        per_device_eval_batch_size=16,
        report_to=[],
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=Source(200_000),
        eval_dataset=Source(20_000, part=12),
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        name, step = trainer.accelerator.distributed_type, trainer.state.global_step
        print(f"{name}: eval_loss {found['eval_loss']:.4f} after {step} updates")


if __name__ == "__main__":
    main()
