"""What Trainer's settings do, as functions that stock Trainer and ours run: each returns what must be the same.

Every function takes the classes to use, a folder, and the number of data-parallel processes; global batches have six
samples everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import trainer_jobs as jobs
from torch.utils.data import IterableDataset

PASSED = (
    "callbacks", "compute_metrics", "preprocess_logits_for_metrics", "optimizers", "compute_loss_func",
    "train_dataset", "eval_dataset", "optimizer_cls_and_kwargs", "data_collator",
)  # fmt: skip
"""What Trainer takes beside its arguments."""


@dataclass
class Classes:
    """Whose trainer it is."""

    trainer: Any
    arguments: Any
    folder: str
    dp: int = 1
    eval_batch: int = 3
    """Stock Trainer's ``eval_loss`` is that of the labels where the whole dataset is one batch; ours in any."""

    @property
    def alone(self) -> bool:
        return self.dp == 1

    def args(self, name: str, **given: Any) -> Any:
        settings = {"per_device_train_batch_size": 6 // self.dp, "per_device_eval_batch_size": self.eval_batch, **given}
        return jobs.arguments(self.arguments, f"{self.folder}/{name}", **settings)

    def make(self, name: str, *, cls: Any = None, model: Any = None, train: int = 22, **given: Any) -> Any:
        passed = {key: given.pop(key) for key in PASSED if key in given}
        data = {"train_dataset": jobs.Words(train), "eval_dataset": jobs.Words(13, begin=1)}
        return (cls or self.trainer)(model or jobs.llama(), self.args(name, **given), **{**data, **passed})


def trained(trainer: Any, *keys: str) -> dict[str, Any]:
    trainer.train()
    return jobs.history(trainer, *(keys or ("loss", "grad_norm", "learning_rate")))


def recorder(events: list[str]) -> Any:
    from transformers import TrainerCallback

    def method(event: str) -> Any:
        def record(_self: Any, _args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert control is not None
            words = ("model", "optimizer", "lr_scheduler", "train_dataloader")
            has = [word for word in words if kwargs.get(word) is not None]
            events.append(f"{event} {state.global_step} {state.epoch or 0:.4f} {'+'.join(has)}")

        return record

    names = ("init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "pre_optimizer_step",
             "optimizer_step", "substep_end", "step_end", "evaluate", "save", "log", "prediction_step")  # fmt: skip
    return type("Recorder", (TrainerCallback,), {f"on_{name}": method(name) for name in names})()


def callbacks(kit: Classes) -> Any:
    """Every event in its order, with step, epoch and what it is given."""
    events: list[str] = []
    trainer = kit.make(
        "callbacks", callbacks=[recorder(events)], eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=3, gradient_accumulation_steps=2, per_device_eval_batch_size=6 // kit.dp, logging_steps=2,
    )  # fmt: skip
    return trained(trainer), events


def callbacks_taken_away(kit: Classes) -> Any:
    """``add_callback``, ``pop_callback`` and ``remove_callback``."""
    from transformers import ProgressCallback, TrainerCallback

    events: list[str] = []
    trainer = kit.make("taken", max_steps=2)
    one = recorder(events)
    trainer.add_callback(one)
    assert trainer.pop_callback(one) is one
    trainer.add_callback(TrainerCallback)
    trainer.remove_callback(TrainerCallback)
    trainer.remove_callback(ProgressCallback)
    return trained(trainer), [type(each).__name__ for each in trainer.callback_handler.callbacks], len(events)


def stops_itself(kit: Classes) -> Any:
    """A callback that ends training, and one that asks for an evaluation and a save."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 4

    trainer = kit.make("stops", callbacks=[Asks()])
    found = trained(trainer, "loss")
    saved = sorted(each.name for each in Path(kit.folder, "stops").iterdir())
    return found, trainer.state.global_step, len(jobs.history(trainer, "eval_loss")["eval_loss"]), saved


def label_smoother(kit: Classes) -> Any:
    """Losses with smoothed labels, which are means over one batch's labels: in batches of equal counts."""
    return trained(kit.make("smooth", label_smoothing_factor=0.1, train_dataset=Even(24)))


def metrics(kit: Classes) -> Any:
    """``compute_metrics`` of what ``preprocess_logits_for_metrics`` leaves."""

    def compute(found: Any) -> dict[str, float]:
        keep = found.label_ids[:, 1:] != -100
        right = found.predictions[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": float(right[keep].mean()), "rows": float(len(found.label_ids))}

    trainer = kit.make(
        "metrics", compute_metrics=compute, eval_strategy="steps", eval_steps=2, eval_accumulation_steps=1,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )  # fmt: skip
    return trained(trainer, "loss", "eval_accuracy", "eval_rows")


def metrics_with_inputs(kit: Classes) -> Any:
    """``include_for_metrics`` hands over inputs and losses; ``eval_on_start``; two datasets by name."""

    def compute(found: Any) -> dict[str, float]:
        return {"inputs": float(np.asarray(found.inputs).sum()), "losses": float(len(found.losses))}

    trainer = kit.make(
        "inputs", compute_metrics=compute, include_for_metrics=["inputs", "loss"], eval_on_start=True, max_steps=2,
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1,
        eval_dataset={"one": jobs.Words(6, begin=1), "two": jobs.Words(7, begin=2)},
    )  # fmt: skip
    return trained(trainer, "loss", "eval_one_inputs", "eval_two_inputs", "eval_one_losses")


class Even(jobs.Words):
    """As many labels in every sample."""

    def __init__(self, size: int, *, begin: int = 0) -> None:
        super().__init__(size, begin=begin)
        self.length = torch.full((size,), 9)


class Lengths(torch.utils.data.Dataset):
    """Samples of their own lengths, for batches of like lengths."""

    def __init__(self, size: int) -> None:
        self.words = jobs.Words(size)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.words[index]
        length = int(self.words.length[index])
        return {"input_ids": row["input_ids"][:length], "labels": row["input_ids"][:length]}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(row["input_ids"]) for row in rows)
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([pad(row["input_ids"], (0, width - len(row["input_ids"]))) for row in rows]),
        "labels": torch.stack([pad(row["labels"], (0, width - len(row["labels"])), value=-100) for row in rows]),
        "attention_mask": torch.stack([(torch.arange(width) < len(row["labels"])).long() for row in rows]),
    }


def group_by_length(kit: Classes) -> Any:
    """Each epoch has every sample once, in global batches of like lengths, in whichever order."""
    seen: list[list[int]] = []

    class Sees(kit.trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            lengths = inputs["attention_mask"].sum(1)
            seen.append(self.accelerator.gather(lengths).tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = kit.make(
        "lengths", cls=Sees, train_dataset=Lengths(24), data_collator=padded, max_steps=8,
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    trainer.train()
    alike = sum(max(one) - min(one) for one in seen) / len(seen) < 3  # of lengths from 2 to 8
    return [sorted(chain(*seen[:4])), sorted(chain(*seen[4:]))], alike


def epochs(kit: Classes) -> Any:
    """As many epochs as asked, where ``max_steps`` does not say otherwise; a fraction of one too."""
    whole = kit.make("epochs", max_steps=-1, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch")
    found = trained(whole, "loss", "eval_loss", "epoch")
    part = kit.make("part", max_steps=-1, num_train_epochs=1.5)
    other = trained(part, "loss")
    saved = sorted(each.name for each in Path(kit.folder, "epochs").iterdir())
    return found, other, whole.state.global_step, part.state.global_step, saved


def max_steps(kit: Classes) -> Any:
    """More steps than an epoch has, with accumulation that does not divide it."""
    trainer = kit.make("steps", max_steps=5, gradient_accumulation_steps=3, num_train_epochs=1)
    return trained(trainer), round(trainer.state.epoch, 6), trainer.state.num_train_epochs


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        words = jobs.Words(24)
        yield from (words[index] for index in range(24))


def iterable(kit: Classes) -> Any:
    """A dataset without a length, more often than once, and an evaluation on one."""
    trainer = kit.make(
        "stream", train_dataset=Stream(), eval_dataset=Stream(), max_steps=6, eval_strategy="steps", eval_steps=3
    )
    return trained(trainer, "loss", "grad_norm", "eval_loss")


def workers(kit: Classes) -> Any:
    """Worker processes, pinned memory, and a last batch that is dropped."""
    return trained(kit.make("workers", dataloader_num_workers=1, dataloader_drop_last=True, dataloader_pin_memory=True))


def early_stopping(kit: Classes) -> Any:
    """Ends when the metric has not improved, and has the best model."""
    from transformers import EarlyStoppingCallback

    trainer = kit.make(
        "early", callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], learning_rate=0.05, max_steps=30,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=False, lr_scheduler_type="constant", save_total_limit=2,
    )  # fmt: skip
    found = trained(trainer, "loss", "eval_loss")
    best = Path(trainer.state.best_model_checkpoint).name
    return found, trainer.state.global_step, best, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def save_total_limit(kit: Classes) -> Any:
    """Old checkpoints go; the best one stays."""
    trainer = kit.make(
        "limit", save_strategy="steps", save_steps=1, save_total_limit=2, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, learning_rate=0.05, max_steps=5, lr_scheduler_type="constant",
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    found = trained(trainer, "loss")
    plain = kit.make("plain-limit", save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=5)
    trained(plain)
    folders = [sorted(each.name for each in Path(kit.folder, name).iterdir()) for name in ("limit", "plain-limit")]
    return found, folders, Path(trainer.state.best_model_checkpoint).name


def auto_find_batch_size(kit: Classes) -> Any:
    """A batch that does not fit is halved, on all ranks alike, and training begins again."""

    class Small(kit.trainer):
        tried: list[int] = []  # noqa: RUF012 (of one test)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = len(inputs["input_ids"])
            self.tried.append(rows)
            if rows * kit.dp > 6:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = kit.make(
        "fits", cls=Small, per_device_train_batch_size=12 // kit.dp, auto_find_batch_size=True, train_dataset=Even(24)
    )
    found = trained(trainer, "loss", "grad_norm")
    tried = [each * kit.dp for each in Small.tried]
    return found, trainer.state.train_batch_size * kit.dp, tried[0], tried == sorted(tried, reverse=True)


def neftune(kit: Classes) -> Any:
    """Noise on embeddings while training, which is away afterwards."""
    model = jobs.llama()
    trainer = kit.make("noise", model=model, neftune_noise_alpha=5.0)
    found = trained(trainer, "loss")
    quiet = trained(kit.make("no-noise"), "loss")
    hooks = len(model.get_input_embeddings()._forward_hooks)
    differs = found["loss"][0] != quiet["loss"][0]
    # Each rank draws noise of its own.
    return differs, hooks, len(found["loss"]), *([found] if kit.alone else [])


def gradient_checkpointing(kit: Classes) -> Any:
    """Activations are computed again, with the same gradients."""
    model = jobs.llama()
    given = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    found = trained(kit.make("again", model=model, gradient_checkpointing=True, **given))
    return found, model.is_gradient_checkpointing


def optimizers(kit: Classes) -> Any:
    """An optimizer and a schedule of the script's."""
    model = jobs.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return trained(kit.make("sgd", model=model, optimizers=(optimizer, schedule)))


def optimizer_class(kit: Classes) -> Any:
    """``optimizer_cls_and_kwargs``, an overridden ``create_scheduler``, and groups with rates of their own."""

    class Own(kit.trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2, gamma=0.5)
            return self.lr_scheduler

    given = {"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-4}), "weight_decay": 0.1}
    return trained(kit.make("rms", cls=Own, **given))


def schedules(kit: Classes) -> Any:
    """Transformers' own schedules, with a warm-up; one that follows a metric."""
    cosine = kit.make("cosine", lr_scheduler_type="cosine_with_restarts", warmup_steps=2)
    found = trained(cosine)
    plateau = kit.make(
        "plateau", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1,
        metric_for_best_model="eval_loss", lr_scheduler_kwargs={"patience": 0, "factor": 0.5}, learning_rate=0.05,
    )  # fmt: skip
    return found, trained(plateau)


def nan_filter(kit: Classes) -> Any:
    """A loss that is no number is left out of what is logged, or shown."""

    class Breaks(kit.trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            return loss * float("nan") if self.state.global_step == 3 else loss

    given = {"logging_steps": 2}
    return [
        trained(kit.make(f"nan-{keep}", cls=Breaks, logging_nan_inf_filter=keep, **given), "loss")["loss"]
        for keep in (True, False)
    ]


def loss_function(kit: Classes) -> Any:
    """``compute_loss_func`` of the script's, which divides by the number of items."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())

    return trained(kit.make("loss", compute_loss_func=loss, gradient_accumulation_steps=2))


def facts(kit: Classes) -> Any:
    """What a script asks: parameters that train, rates, groups, and numbers of samples."""
    trainer = kit.make("facts")
    result = trainer.train()
    loader = trainer.get_train_dataloader()
    name, parameter = next(iter(trainer.model.named_parameters()))
    return {
        "parameters": trainer.get_num_trainable_parameters(), "rates": trainer.get_learning_rates(),
        "group": trainer.get_optimizer_group(parameter)["weight_decay"], "name": name,
        "samples": trainer.num_examples(loader), "loss": result.training_loss, "step": result.global_step,
        "flops": trainer.state.total_flos,
    }  # fmt: skip


def tokens_seen(kit: Classes) -> Any:
    """``include_num_input_tokens_seen`` counts over all ranks."""
    trainer = kit.make("tokens", include_num_input_tokens_seen="all", train_dataset=Even(24))
    return trained(trainer, "loss", "num_input_tokens_seen")


def without_labels(kit: Classes) -> Any:
    """``predict`` of a dataset that has none, and an evaluation of the loss alone."""

    class Unlabelled(jobs.Words):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": super().__getitem__(index)["input_ids"]}

    trainer = kit.make("predict", prediction_loss_only=False, per_device_eval_batch_size=2)
    found = trainer.predict(Unlabelled(13, begin=1))
    return torch.as_tensor(found.predictions), found.label_ids is None


def hub(kit: Classes) -> Any:
    """The main process alone makes the repository and uploads, what stock Trainer uploads, and ours beside it."""
    calls: list[Any] = []

    class Api:
        def create_repo(self, name: str, **_: Any) -> Any:
            calls.append(("create", name))
            return mock.Mock(repo_id=name)

        def upload_folder(self, **given: Any) -> Any:
            upload = Path(given["folder_path"]).name, given["commit_message"], given.get("path_in_repo")
            calls.append(("upload", given["repo_id"], *upload))
            return mock.Mock(is_done=lambda: True)

    with mock.patch("transformers.trainer.hf_api", Api):
        trainer = kit.make(
            "hub", push_to_hub=True, hub_model_id="someone/words", save_strategy="steps", save_steps=3,
            hub_strategy="every_save", max_steps=3,
        )  # fmt: skip
        trainer.create_model_card = lambda *_, **__: calls.append(("card",))
        trainer.train()
        trainer.push_to_hub()
    return calls, trainer.is_world_process_zero()


FEATURES = (
    callbacks, callbacks_taken_away, stops_itself, label_smoother, metrics, metrics_with_inputs, group_by_length,
    epochs, max_steps, iterable, workers, early_stopping, save_total_limit, auto_find_batch_size, neftune,
    gradient_checkpointing, optimizers, optimizer_class, schedules, nan_filter, loss_function, facts, tokens_seen,
    without_labels, hub,
)  # fmt: skip


def run(engine: str | None, folder: str, dp: int = 1, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """What each feature found; the words of the error where it raised. Stock Trainer without an engine."""
    import traceback

    import transformers

    import drivetrain_transformers

    jobs.quiet()
    if engine is not None:
        jobs.configured({"use_cpu": True, "distributed_type": engine})
    else:
        jobs.without_launcher()
    package = transformers if engine is None else drivetrain_transformers
    found: dict[str, Any] = {}
    for feature in FEATURES:
        if only and feature.__name__ not in only:
            continue
        eval_batch = 32 if engine is None else 3
        kit = Classes(package.Trainer, package.TrainingArguments, f"{folder}/{feature.__name__}", dp, eval_batch)
        try:
            found[feature.__name__] = feature(kit)
        except Exception:
            found[feature.__name__] = traceback.format_exc()
    return found
