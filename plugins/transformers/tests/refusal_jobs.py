"""Runs a Trainer that is refused, and one as the refusal advises, for the ranks of test_trainer_refusals.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import trainer_jobs as jobs

SINGLE = {"distributed_type": "single"}


def said_by(run: Any, *args: Any, **given: Any) -> str:
    """Return the error that a call raises."""
    try:
        run(*args, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def arguments(folder: str, refused: dict[str, Any], advised: dict[str, Any]) -> Any:
    """Return what a run with these arguments says, and the losses of one with those that it advises."""
    words = said_by(jobs.ours, SINGLE, f"{folder}/refused", **refused)
    return words, jobs.ours(SINGLE, f"{folder}/advised", **advised)[0]["loss"]


def compiled(folder: str) -> Any:
    """As :func:`arguments`, where the model is to be compiled before it is given to the Trainer."""

    def model() -> Any:
        made = jobs.llama()
        made.compile(mode="default", backend="aot_eager")
        return made

    words = said_by(jobs.ours, SINGLE, f"{folder}/refused", torch_compile=True, torch_compile_mode="default")
    return words, jobs.ours(SINGLE, f"{folder}/advised", model=model)[0]["loss"]


def stepping_in_backward(folder: str) -> Any:
    """As :func:`arguments`, for the optimizers with which Trainer hands ``backward`` the rate."""
    import torch

    import drivetrain_transformers

    jobs.quiet()
    jobs.configured({"use_cpu": True, **SINGLE})
    model = jobs.llama()
    args = jobs.arguments(drivetrain_transformers.TrainingArguments, f"{folder}/refused", optim="lomo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    # Trainer makes LOMO itself only where its package is installed; what follows is the same.
    trainer = drivetrain_transformers.Trainer(
        model, args, train_dataset=jobs.Words(22), optimizers=(optimizer, schedule)
    )
    words = said_by(trainer.train)
    trainer.accelerator.end_training()
    return words, jobs.ours(SINGLE, f"{folder}/advised", optim="adamw_torch")[0]["loss"]


def shards_of_transformers(folder: str, advised: dict[str, Any]) -> Any:
    """As :func:`arguments`, where Transformers shares the layers out while it loads them."""
    import torch.distributed as dist
    import transformers

    jobs.quiet()
    jobs.configured({"use_cpu": True, **SINGLE, "distributed_type": "ddp"})
    saved = Path(folder) / f"saved-{os.environ['RANK']}"
    jobs.llama().save_pretrained(saved)
    dist.init_process_group("gloo")

    def loaded() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(saved, tp_plan="auto")

    words = said_by(jobs.ours, {"distributed_type": "ddp"}, f"{folder}/refused", model=loaded)
    dist.destroy_process_group()

    def whole() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(saved)

    return words, jobs.ours(advised, f"{folder}/advised", model=whole)[0]["loss"]


def of_tomorrow(folder: str) -> str:
    """Return the refusal of a Transformers that passes one argument more."""
    from drivetrain_transformers import trainer

    ours: Any = trainer.TrainerAccelerator
    trainer.TrainerAccelerator = lambda *args, **given: ours(*args, of_tomorrow=1, **given)  # type: ignore[misc, assignment]
    return said_by(jobs.ours, SINGLE, folder)


def resumed_from(folder: str) -> Any:
    """Return what a Trainer of an adapter says of folders of others, and the losses of those that go on."""
    import peft

    def other() -> Any:
        model = jobs.llama()
        return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["k_proj"]))

    save = {"save_strategy": "steps", "save_steps": 3}
    uninterrupted = {
        name: jobs.stock(f"{folder}/{name}", model=model, **save)[0]["loss"]
        for name, model in (("whole", jobs.llama), ("other", other), ("own", jobs.lora))
    }
    words = {
        name: said_by(jobs.ours, SINGLE, f"{folder}/again", model=jobs.lora, resume=f"{folder}/{name}/checkpoint-3")
        for name in ("whole", "other")
    }

    def as_advised() -> Any:
        return peft.PeftModel.from_pretrained(jobs.llama(), f"{folder}/other/checkpoint-3", is_trainable=True)

    resumed = {
        name: jobs.ours(SINGLE, f"{folder}/again", model=model, resume=f"{folder}/{name}/checkpoint-3")[0]["loss"]
        for name, model in (("own", jobs.lora), ("other", as_advised))
    }
    return words, resumed, uninterrupted


def groups_of_generations(folder: str) -> Any:
    """As :func:`arguments`, for a trainer of TRL on two processes that share one model."""
    config = {"distributed_type": "megatron", "mesh": {"tp": 2}}
    sizes = {"num_generations": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 2}
    words = said_by(jobs.trl_trainer, "grpo", f"{folder}/refused", config, per_device_train_batch_size=2, **sizes)
    trainer = jobs.trl_trainer("grpo", f"{folder}/advised", config, per_device_train_batch_size=4, **sizes)
    trainer.train()
    losses = jobs.history(trainer, "loss")["loss"]
    trainer.accelerator.end_training()
    return words, losses
