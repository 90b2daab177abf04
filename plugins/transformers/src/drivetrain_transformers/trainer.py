"""``Trainer`` on Drivetrain: overrides what Transformers' own does with engines, losses over ranks, and checkpoints."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from drivetrain import DataLoaderShard, skip_first_batches
from drivetrain.api import UnsupportedError, UsageError
from drivetrain_transformers import private_names, weights
from drivetrain_transformers.accelerator import TrainerAccelerator
from drivetrain_transformers.arguments import RunState, adopt, refuse_engine
from drivetrain_transformers.items import ObservedNumber, is_compiled, num_labels, seems_to_use_number

logger = logging.get_logger(__name__)

STATE = "drivetrain"
"""Folder in a checkpoint of Trainer: the run's portable state."""

FACTS = "drivetrain_trainer.json"
"""File beside it: what a resumed run is compared with."""

their_module: Any = import_module("transformers.trainer")

StockTrainer = transformers.Trainer
"""Transformers' own, also after ``drivetrain launch --trainer`` has replaced it."""

_their_skip_first_batches = their_module.skip_first_batches
_their_accelerator = their_module.Accelerator


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Accelerate's would build a loader of its own, which every rank reads whole, of one that is prepared here."""
    ours = isinstance(dataloader, DataLoaderShard) or hasattr(dataloader, "base_dataloader")
    return (skip_first_batches if ours else _their_skip_first_batches)(dataloader, num_batches)


their_module.skip_first_batches = _skip_first_batches


class Trainer(StockTrainer):
    """Transformers' ``Trainer``, whose engine is the run's ``distributed_type``.

    Arguments, attributes and methods are Transformers'. Losses, gradients and metrics are those of one process, and a
    checkpoint folder also holds the run's portable state, which any backend and number of processes resumes.

    Raises:
        UsageError: arguments that choose an engine, with the configuration to write instead.
        UnsupportedError: what cannot be right here.
    """

    # Set by the time that anything here reads them.
    model: Any
    lr_scheduler: Any
    _gen_kwargs: dict[str, Any]

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **named: Any) -> None:
        if args is None:
            args = transformers.TrainingArguments(output_dir="tmp_trainer")
        adopt(args)
        self._portable_rng: Any = None
        self._train_loader: Any = None
        self._evaluating = False
        self._own_loss = True
        self._uses_number: bool | None = None
        self._shares: list[tuple[float, bool]] = []
        self._counts: list[Any] = []
        self._micro_batch = 0
        private_names.check()
        super().__init__(model, args, *others, **named)
        private_names.check_made(self)
        self._refuse_generation()

    # ---- accelerator ------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator of this run. Collective over all ranks."""
        adopt(self.args)
        refuse_engine(self.args)
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise UnsupportedError(
                "train_sampling_strategy='batch_rebalance' cuts the data among processes by itself",
                cure="Choose 'random', 'sequential' or 'group_by_length'.",
            )
        their_module.Accelerator = partial(TrainerAccelerator, self)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            their_module.Accelerator = _their_accelerator
        if self.accelerator.distributed_type == "xla":
            raise UnsupportedError(
                "Trainer has a path of its own for torch_xla, which Drivetrain does not go",
                cure="Choose another distributed_type, or write the loop: examples/language_model.py.",
            )
        state = self.args.distributed_state
        assert isinstance(state, RunState), "made by adopt()"
        counted = state.num_processes
        state.follow(self.accelerator)
        self._count_again(counted)
        self.accelerator.register_save_state_pre_hook(self._leave_out_weights)
        self.accelerator.register_load_state_pre_hook(self._leave_out_model)

    def _refuse_generation(self) -> None:
        """Refuse to generate by an encoder and a decoder in stages, before anything was trained for it."""
        generates = getattr(self.args, "predict_with_generate", False)
        of_two = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        if generates and of_two and self.accelerator.backend.capabilities.pipelined:
            raise UnsupportedError(
                f"predict_with_generate calls the encoder of {type(self.model).__name__} by itself, and in a pipeline "
                "it lies on one of the stages",
                cure="Set predict_with_generate=False, evaluate by eval_loss and generate from the saved folder on one "
                "process afterwards; or train without a pipeline, such as mesh: {tp: 2} or distributed_type: fsdp.",
            )

    def _count_again(self, counted: int) -> None:
        """Sizes of TRL's that were computed before the mesh was known, when every process counted as a share."""
        args: Any = self.args
        steps = getattr(args, "steps_per_generation", None)
        if steps is None or counted == args.world_size:
            return
        size = args.per_device_train_batch_size * args.world_size * steps
        if size % args.num_generations:
            raise UsageError(
                f"a generation batch of {size} ({args.world_size} data-parallel process(es)) cannot be divided into "
                f"groups of num_generations={args.num_generations}",
                cure="Choose per_device_train_batch_size or num_generations so that it can.",
            )
        logger.warning(
            "generation_batch_size is %d: %d process(es) share the data, where the arguments counted %d.",
            size, args.world_size, counted,
        )  # fmt: skip
        args.generation_batch_size = size

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: ``prepare`` moves it, in shards where it is too large for one device."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As Transformers' own, without parameter groups that hold nothing, as LoRA's without decay."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new and any(group["params"] for group in optimizer.param_groups):
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader: Any = super()._get_dataloader(*args, **kwargs)
        init = getattr(loader.base_dataloader, "worker_init_fn", None)
        if isinstance(init, partial) and "rank" in init.keywords:
            # Processes that read the same samples must augment them alike.
            init.keywords["rank"] = self.accelerator.data_parallel_rank
        return loader

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._train_loader = train_dataloader
        self._portable_rng = None
        self._uses_number = None
        if self.accelerator.backend.capabilities.pipelined:
            _require_grads_once(self.model)
        return super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )

    # ---- training step ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Read the batches of a window, and count what their losses are means over. Collective over data ranks."""
        batches: list[Any] = []
        self._shares, self._micro_batch = [], 0
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
            self._shares.append(self.accelerator.shares())
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The labels that count, of the whole window over all data-parallel ranks; in evaluation of these batches.

        A whole number: an engine that casts what it is given would round another one.
        """
        with self._counting_here():
            counts: list[Any] = [super(Trainer, self)._get_num_items_in_batch([one], device) for one in batch_samples]
        if self._evaluating or not counts or any(not isinstance(one, Tensor) for one in counts):
            self._counts = []
            return None if not counts else counts[0] if len(counts) == 1 else None
        whole = [one.round().long() for one in counts]
        if len(self._shares) == len(whole):
            whole = [one if real else torch.zeros_like(one) for one, (_, real) in zip(whole, self._shares, strict=True)]
        self._counts = whole
        total = torch.stack(whole).sum()
        if self.args.average_tokens_across_devices:
            total = self.accelerator.reduce(total, "sum")
        # Of a window without a label the loss is 0, not 0 / 0.
        return total.clamp(min=1)

    @contextmanager
    def _counting_here(self) -> Iterator[None]:
        """Context in which numbers of items are this process's."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss, as Transformers' own method does."""
        self._own_loss = False
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As Transformers' own, with gradients of one big batch whatever a model does with ``num_items_in_batch``."""
        index, self._micro_batch = self._micro_batch, self._micro_batch + 1
        weight, real = self._shares[index] if index < len(self._shares) else (1.0, True)
        number = num_items_in_batch
        by_items = number is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        observed: ObservedNumber | None = None
        if by_items and self._uses_number is None:
            if self.accelerator.backend.capabilities.pipelined or is_compiled(model) or is_compiled(self.model):
                self._uses_number = self.compute_loss_func is not None or seems_to_use_number(self.model)
            elif isinstance(number, Tensor):
                number = observed = ObservedNumber.of(number)
        self._own_loss = True

        def factor() -> Any:
            if not by_items and self.loss_is_scaled_for_ga is not True:
                return weight if weight != 1.0 else None
            if observed is not None:
                self._uses_number = bool(observed.uses)
            if self._uses_number is False and index < len(self._counts):
                return self._weight_of_mean(index, num_items_in_batch)
            return None if real else 0.0

        self.accelerator.factor = factor
        try:
            loss = super().training_step(model, inputs, number)
        finally:
            self.accelerator.factor = None
        applied = self.accelerator.applied
        if applied is None:
            return loss
        # What a mean over no label is, is no number.
        return torch.where(torch.as_tensor(applied, device=loss.device) == 0, torch.zeros_like(loss), loss * applied)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Whether Trainer must clip by itself: no, since the accelerator's clipping spans every mesh."""
        return False

    def _weight_of_mean(self, index: int, total: Tensor) -> Tensor:
        """Factor for a mean over the labels of one batch that was taken for a sum over all, divided by their number."""
        share: Tensor = self._counts[index] / total
        # A compute_loss of the script's own did not multiply by the number of processes, as Transformers' does.
        lacks = self._own_loss and self.args.average_tokens_across_devices
        return share * self.accelerator.num_processes if lacks else share

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As Transformers' own, but ``eval_loss`` is the mean over all labels, and each sample is predicted once.

        Collective over all ranks.
        """
        self._prepare_for_evaluation()
        step = self.prediction_step
        found: list[tuple[Tensor, Any]] = []

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows: int = find_batch_size(inputs) or 1  # type: ignore[no-untyped-call]
            number = num_labels(inputs, self.label_names, shifted=self._loss_shifts_labels, rows=rows)
            _, real = self.accelerator.shares()
            result = step(model, inputs, *args, **kwargs)
            if result[0] is not None and real:
                found.append((result[0].detach().float().mean(), number))
            return result

        # Seq2SeqTrainer gathers repeated samples too, and cuts nothing.
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if hasattr(self, "_gen_kwargs") and not self.accelerator.backend.capabilities.replicated:
            # generate() gathers parameters in each step: no rank may end before the others.
            self._gen_kwargs.setdefault("synced_gpus", self.accelerator.num_processes > 1)
        if hasattr(self, "_gen_kwargs") and self.accelerator.backend.capabilities.pipelined:
            # Keys and values of earlier words would lie on the stages that computed them.
            self._gen_kwargs.setdefault("use_cache", False)
        self.prediction_step = counted  # type: ignore[method-assign]
        self._evaluating = True
        try:
            with self._counting_here():
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        finally:
            self._evaluating = False
            del self.prediction_step
        key = f"{metric_key_prefix}_loss"
        if output.metrics is not None and key in output.metrics:
            output.metrics[key] = self._mean_over_labels(found, output.metrics[key])
        return output

    def _mean_over_labels(self, found: list[tuple[Tensor, Any]], otherwise: float) -> float:
        """Mean of the losses of all ranks' batches, weighed by their labels. Collective over data-parallel ranks."""
        sums = torch.zeros(2, dtype=torch.float64)
        if found:
            losses = torch.stack([loss for loss, _ in found]).cpu().double()
            numbers = torch.stack([torch.as_tensor(number) for _, number in found]).cpu().double()
            counts = numbers > 0
            if self.args.logging_nan_inf_filter:
                counts &= losses.isfinite()
            sums = torch.stack([(losses * numbers)[counts].sum(), numbers[counts].sum()])
        total, number = torch.stack(self.accelerator.backend.gather_object(sums)).sum(0).tolist()
        return total / number if number else otherwise

    def _prepare_for_evaluation(self) -> None:
        """Prepare the model for an evaluation before ``train()``, with its optimizer if it will be trained."""
        if self.accelerator.is_prepared(self.model):
            return
        if self.train_dataset is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
            return
        self.create_optimizer()
        _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for ``from_pretrained``. Collective over all ranks where parameters are sharded."""
        folder = self.args.output_dir if output_dir is None else output_dir
        replicated = self.accelerator.backend.capabilities.replicated
        if self.args.save_on_each_node and not replicated:
            raise UnsupportedError(
                "save_on_each_node: the main process alone gathers a model that is sharded",
                cure="Set save_on_each_node=False, and let the folder be one that all machines see.",
            )
        state = None
        if self.accelerator.is_prepared(self.model):
            state = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            with weights.names_alone(self.model, state):
                self._save(folder, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the portable state: weights, optimizer, random state, position in the data. Collective."""
        self.accelerator.keep_only_loader(self._train_loader)
        self.accelerator.save_state(Path(output_dir, STATE))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, their_module.SCHEDULER_NAME))
            facts = {"total_train_batch_size": self.get_total_train_batch_size(self.args)}
            Path(output_dir, FACTS).write_text(json.dumps(facts), encoding="utf-8")

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: the portable state holds it."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: the portable state holds it."""

    def _leave_out_weights(self, _models: list[Any], found: list[Any], _folder: str) -> None:
        if weights.has_adapter(self.model):
            found.clear()

    def _leave_out_model(self, models: list[Any], _folder: str) -> None:
        if weights.has_adapter(self.model):
            models.clear()

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        facts = Path(resume, FACTS) if resume is not None else None
        if facts is not None and facts.is_file() and not self.args.ignore_data_skip:
            saved = json.loads(facts.read_text(encoding="utf-8"))["total_train_batch_size"]
            here = self.get_total_train_batch_size(self.args)
            if saved != here:
                raise UsageError(
                    f"{resume} was trained with {saved} samples in each update, this run takes {here}: its place in "
                    "the data and in the schedule would be another",
                    cure=f"Choose per_device_train_batch_size and gradient_accumulation_steps so that their product "
                    f"with {self.args.world_size} data-parallel process(es) is {saved}, or set ignore_data_skip=True "
                    "to begin the epoch anew.",
                )
        result: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        return result

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights, unless they come with the portable state. Collective once the model is prepared."""
        if _has_state(resume_from_checkpoint) and not weights.has_adapter(self.model):
            return
        if self.accelerator.is_prepared(self.model):
            self._load_weights(resume_from_checkpoint)
            return
        if weights.has_adapter(self.model):
            # Trainer would go on with the adapter as it is, and fail over the optimizer.
            weights.read(self.model, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the portable state, else what stock Trainer wrote. Collective over all ranks."""
        if checkpoint is None:
            return
        if not _has_state(checkpoint):
            self._load_stock_optimizer(checkpoint)
            return
        self.accelerator.keep_only_loader(self._train_loader)
        self.accelerator.load_state(Path(checkpoint, STATE), strict=not weights.has_adapter(self.model))
        state = torch.load(Path(checkpoint, their_module.SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(state)
        # Set again where the loop goes on, behind what is drawn in between.
        self._portable_rng = _random_state()

    def _load_stock_optimizer(self, checkpoint: str) -> None:
        files = [Path(checkpoint, name) for name in (their_module.OPTIMIZER_NAME, their_module.SCHEDULER_NAME)]
        optimizer, scheduler = (
            torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None for file in files
        )
        if optimizer is None:
            logger.warning(
                "%s holds no optimizer state that can be loaded here: moments begin at zero, and only weights, step "
                "and schedule go on.",
                checkpoint,
            )
        elif not self.accelerator.backend.capabilities.replicated:
            raise UnsupportedError(
                f"{checkpoint} holds an optimizer that Transformers' own Trainer wrote whole, and here it is sharded",
                cure="Resume and save once under distributed_type: single or ddp, then resume from that checkpoint; or "
                f"delete {their_module.OPTIMIZER_NAME} there to go on with new moments.",
            )
        else:
            scheduler = _without_empty_groups(optimizer, scheduler)
            assert self.optimizer is not None, "made before it is prepared"
            self.optimizer.load_state_dict(optimizer)
        if scheduler is not None:
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not _has_state(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._portable_rng is not None:
            _set_random_state(self._portable_rng)
        elif checkpoint is not None and not _has_state(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the prepared model. Collective over all ranks."""
        best = str(self.state.best_model_checkpoint)
        logger.info("Loading best model from %s (score: %s).", best, self.state.best_metric)
        if _has_state(best) and not weights.has_adapter(self.model):
            self.accelerator.load_weights(self.model, Path(best, STATE))
        else:
            self._load_weights(best)

    def _load_weights(self, folder: str) -> None:
        """Load a folder of ``save_pretrained`` into the prepared model. Collective over all ranks."""
        tensors = weights.read(self.model, folder)
        scratch = Path(str(self.args.output_dir), f".drivetrain-weights-{self.state.global_step}")
        self.accelerator.load_tensors(self.model, tensors, scratch)


class Seq2SeqTrainer(transformers.Seq2SeqTrainer, Trainer):
    """Transformers' ``Seq2SeqTrainer`` on Drivetrain: see :class:`Trainer`. Each sample is predicted once."""


def on_drivetrain(trainer_class: type[transformers.Trainer]) -> type[Any]:
    """A class of the same name whose engine is the run's ``distributed_type``, of any subclass of Trainer.

    What the class overrides stays in force: Drivetrain's methods come right before those of ``transformers.Trainer``.

    Raises:
        UsageError: it is no such class.
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, StockTrainer):
        raise UsageError(
            f"{trainer_class!r} is no subclass of transformers.Trainer",
            cure="Give transformers.Trainer itself, or a class that derives from it.",
        )
    if issubclass(trainer_class, Trainer):
        return trainer_class
    bases = (Trainer,) if trainer_class is StockTrainer else (trainer_class, Trainer)
    names = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, bases, names)


def _require_grads_once(model: nn.Module) -> None:
    """Keep Transformers from hooking a model's embeddings again where it switches gradient checkpointing on again.

    TRL switches it off for the forward of a reference model, and on before backward, where a pipeline runs the forward
    with the hooks that it was called with.
    """

    def once(part: Any, enable: Any) -> None:
        if not getattr(part, "_require_grads_hooks", None):
            enable()

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and "enable_input_require_grads" not in vars(part):
            vars(part)["enable_input_require_grads"] = partial(once, part, part.enable_input_require_grads)


def _has_state(checkpoint: str | os.PathLike[str]) -> bool:
    return Path(checkpoint, STATE, "manifest.json").is_file()


def _random_state() -> tuple[Any, ...]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    own = getattr(torch, device.type).get_rng_state() if device is not None else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, own = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if own is not None:
        device = torch.accelerator.current_accelerator()
        assert device is not None, "its state was read"
        getattr(torch, device.type).set_rng_state(own)


def _without_empty_groups(optimizer: dict[str, Any], scheduler: dict[str, Any] | None) -> dict[str, Any] | None:
    """Take the groups that hold nothing, which ours leaves out, from states of Trainer's: in place, and returned."""
    groups = optimizer["param_groups"]
    held = [index for index, group in enumerate(groups) if group["params"]]
    optimizer["param_groups"] = [groups[index] for index in held]
    return scheduler and {
        name: [value[index] for index in held] if isinstance(value, list) and len(value) == len(groups) else value
        for name, value in scheduler.items()
    }
