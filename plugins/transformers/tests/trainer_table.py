"""Measures what the table of ``docs/reference/trainer.md`` says: every backend beside stock Trainer on one process.

    make trainer-table

Each cell is the greatest difference of a loss, or the words of a refusal. They are written to ``trainer_table.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trainer_jobs as jobs

from drivetrain_testing import preload, spawn

RECORD = Path(__file__).with_name("trainer_table.json")

BACKENDS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: configuration, processes, data-parallel processes
    "single": ({"distributed_type": "single"}, 1, 1),
    "dp": ({"distributed_type": "dp"}, 1, 1),
    "ddp x 2": ({"distributed_type": "ddp"}, 2, 2),
    "ddp x 3": ({"distributed_type": "ddp"}, 3, 3),
    "fsdp x 2": ({"distributed_type": "fsdp"}, 2, 2),
    "ZeRO-2 x 2": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 2}, 2, 2),
    "ZeRO-3 x 2": ({"distributed_type": "deepspeed", "deepspeed.zero_stage": 3}, 2, 2),
    "tp 2": ({"distributed_type": "megatron", "mesh.tp": 2}, 2, 1),
    "pp 2": ({"distributed_type": "megatron", "mesh.pp": 2}, 2, 1),
    "pp 2, ddp x 2": ({"distributed_type": "megatron", "mesh.pp": 2}, 4, 2),
    "tp 2, fsdp x 2": ({"distributed_type": "megatron", "mesh.tp": 2, "megatron.data_parallel": "fsdp"}, 4, 2),
}

FEATURES = ("accumulation", "ragged labels", "evaluation", "resume", "best model", "LoRA", "generate", "bf16")

TOLERANCE = 1e-6
"""Of losses near 4 in float32: two of their last digits."""

TOLERANCE_BF16 = 5e-3
"""bfloat16 has 8 bits: other orders of adding round otherwise."""

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
BEST: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.03,
    "load_best_model_at_end": True, "lr_scheduler_type": "constant", "metric_for_best_model": "eval_loss",
    "adam_epsilon": 1e-3,
}  # fmt: skip


class Even(jobs.Words):
    """As many labels in every sample."""

    def __init__(self, size: int, *, begin: int = 0) -> None:
        super().__init__(size, begin=begin)
        self.length = torch.full((size,), 9)


def run(config: dict[str, Any] | None, folder: str, dp: int, feature: str) -> list[float]:
    """Losses of one cell; of stock Trainer where there is no configuration.

    Stock Trainer's ``eval_loss`` is right where the whole dataset is one batch; ours in any.
    """
    import transformers

    import drivetrain_transformers

    jobs.quiet()
    if config is not None:
        jobs.configured({"use_cpu": True, **config})
    else:
        jobs.without_launcher()
    package: Any = transformers if config is None else drivetrain_transformers
    model, train, given = jobs.llama, jobs.Words(24), {}
    resume = None
    if feature == "accumulation":
        train = Even(24)
    elif feature == "evaluation":
        given = {"eval_strategy": "steps", "eval_steps": 2}
    elif feature == "best model":
        given = BEST
    elif feature == "LoRA":
        model = jobs.lora
    elif feature == "bf16":
        given = {"bf16": True}

    def trainer(name: str, **more: Any) -> Any:
        settings = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2, **given, **more}
        settings["per_device_eval_batch_size"] = 2 if config is not None else 16
        args = jobs.arguments(package.TrainingArguments, f"{folder}/{name}", **settings)
        return package.Trainer(model(), args, train_dataset=train, eval_dataset=jobs.Words(13, begin=1))

    if feature == "resume" and config is not None:
        trainer("first", **SAVES, max_steps=6).train()
        resume = f"{folder}/first/checkpoint-3"
    made = trainer("run")
    made.train(resume_from_checkpoint=resume)
    losses: list[float] = jobs.history(made, "loss")["loss"]
    if feature == "resume":
        losses = losses[-3:]
    if feature in ("evaluation", "best model"):
        losses = losses + jobs.history(made, "eval_loss")["eval_loss"]
    if feature == "best model":
        losses = [*losses, made.evaluate()["eval_loss"]]
    made.accelerator.end_training()
    return losses


def generated(config: dict[str, Any] | None, folder: str) -> list[float]:
    """What T5 generates for 13 samples, as numbers."""
    if config is not None:
        return [float(one) for one in jobs.seq2seq(config, folder)[0].flatten()]
    import transformers

    jobs.quiet()
    jobs.without_launcher()
    args = jobs.arguments(
        transformers.Seq2SeqTrainingArguments, folder, per_device_eval_batch_size=2, predict_with_generate=True,
        generation_max_length=6,
    )  # fmt: skip
    model = jobs.t5()
    found = transformers.Seq2SeqTrainer(model, args).predict(jobs.Words(13, begin=1)).predictions
    return [float(one) for one in torch.as_tensor(found).flatten()]


def refused(job: Callable[..., Any], *arguments: Any) -> Any:
    """What the job returns, or the words of its refusal."""
    from drivetrain.api import UnsupportedError, UsageError

    try:
        return job(*arguments)
    except (UnsupportedError, UsageError) as error:
        return str(error)


def cell(config: dict[str, Any] | None, folder: str, dp: int, feature: str) -> Any:
    """What one rank finds."""
    if feature == "generate":
        return refused(generated, config, folder)
    return refused(run, config, folder, dp, feature)


def cells(config: dict[str, Any] | None, folder: str, dp: int, features: tuple[str, ...]) -> dict[str, Any]:
    """All of them in one group of ranks."""
    return {feature: cell(config, f"{folder}/{feature}", dp, feature) for feature in features}


def expected(folder: str, features: tuple[str, ...] = FEATURES) -> dict[str, Any]:
    """What stock Trainer finds."""
    return spawn(cells, 1, None, f"{folder}/stock", 1, features, timeout=240)[0]


def measure(
    name: str, reference: dict[str, Any], folder: str, features: tuple[str, ...] = FEATURES
) -> dict[str, float | str]:
    """By feature, the greatest difference over all ranks, or the words of the refusal."""
    config, processes, dp = BACKENDS[name]
    ranks = spawn(cells, processes, config, f"{folder}/{name.replace(' ', '-')}", dp, features, timeout=400)
    found: dict[str, float | str] = {}
    for feature in features:
        results = [rank[feature] for rank in ranks]
        words = next((one for one in results if isinstance(one, str)), None)
        found[feature] = words or max(apart(one, reference[feature]) for one in results)
    return found


def apart(one: list[float], other: list[float]) -> float:
    """The greatest difference; infinite for lists of different lengths."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))


def main() -> None:
    """Measure everything, or some backends, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="all by default")
    parser.add_argument("--feature", action="append", choices=FEATURES, help="all by default")
    options = parser.parse_args()
    chosen, features = options.backend or list(BACKENDS), tuple(options.feature or FEATURES)
    models = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "t5"))
    preload("drivetrain_transformers.trainer", "peft", *models)
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        reference = expected(folder, features)
        for name in chosen:
            record[name] = {**record.get(name, {}), **measure(name, reference, folder, features)}
            sys.stdout.write(f"{name}: {record[name]}\n")
            sys.stdout.flush()
    ordered = {name: record[name] for name in BACKENDS if name in record}
    RECORD.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # Ranks find their function by the name of its module.
    import trainer_table

    trainer_table.main()
