"""The examples of the documentation; run as a program, it prints them.

    python plugins/planner/tests/planner_examples.py [PART ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain_planner.choosing import choose
from drivetrain_planner.machines import find
from drivetrain_planner.report import lines
from drivetrain_planner.requests import Asked, request

PAGE = Path(__file__).parents[3] / "docs/explanation/planner-examples.md"

RESNET = """
import torch
from transformers import ResNetConfig, ResNetForImageClassification


def make():
    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def batch():
    return {"pixel_values": torch.ones(64, 3, 224, 224), "labels": torch.zeros(64, dtype=torch.long)}
"""


@dataclass(frozen=True)
class Example:
    """One example.

    Args:
        config: class and fields of a Transformers configuration; empty for a script.
        machine: as ``--machine`` names it.
        processes: over all machines.
        asked: further fields of :class:`Asked`.
        script: source of ``train.py``.
    """

    config: tuple[str, dict[str, Any]] = ("", {})
    machine: str = "h100x8"
    processes: int = 8
    asked: dict[str, Any] = field(default_factory=dict)
    script: str = ""

    def choice(self, folder: Path):
        """What is chosen, with the files in this folder."""
        machine = find(self.machine)
        if self.script:
            path = folder / "train.py"
            path.write_text(self.script, encoding="utf-8")
            named = {"model": f"{path}:make", "batch": f"{path}:batch"}
        else:
            import transformers

            kind, fields = self.config
            getattr(transformers, kind)(**fields).save_pretrained(folder)
            named = {"model": str(folder)}
        return choose(request(Asked(processes=self.processes, **named, **self.asked), machine), machine)


EXAMPLES = {
    "Llama-3-8B": Example(
        config=(
            "LlamaConfig",
            {
                "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8,
            },
        ),
        asked={"length": 8192, "mixed_precision": "bf16"},
    ),
    "Qwen3-30B-A3B": Example(
        config=(
            "Qwen3MoeConfig",
            {
                "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
                "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            },
        ),
        processes=16,
        asked={"length": 4096, "mixed_precision": "bf16"},
    ),
    "TinyLlama-1.1B": Example(
        config=(
            "LlamaConfig",
            {
                "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                "num_attention_heads": 32, "num_key_value_heads": 4,
            },
        ),
        machine="rtx4090",
        processes=1,
        asked={"length": 2048, "mixed_precision": "bf16"},
    ),
    "ResNet-50": Example(machine="rtx4090x2", processes=2, script=RESNET, asked={"mixed_precision": "bf16"}),
}  # fmt: skip


def shown(name: str) -> list[str]:
    """Lines of the example's block on the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {name}")[2]
    return [line.rstrip() for line in section.partition("```text\n")[2].partition("```")[0].splitlines()]


def main(asked: list[str]) -> None:
    """Print."""
    for name, example in EXAMPLES.items():
        if asked and not any(part in name for part in asked):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = example.choice(Path(folder))
        seconds = f"({time.perf_counter() - began:.0f} s)"
        sys.stdout.write("\n".join([f"## {name}", *lines(found, explain=True), seconds, ""]))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
