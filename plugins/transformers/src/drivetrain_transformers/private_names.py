"""Names of Transformers' Trainer and of Accelerate that this package overrides, replaces or sets.

A method that Trainer has renamed would silently no longer be overridden. An attribute that is
set and that no code reads any more has no effect either. So all are looked up before a Trainer is made, and what is set
is read back in the way that Transformers reads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import operations

from drivetrain.api import BackendBlockedError

TESTED = "5.24.0"
"""The release that ``locks/dev.txt`` holds."""

TESTED_ACCELERATE = "1.15.0"
"""The release that ``locks/dev.txt`` holds."""

generation: Any = import_module("transformers.generation.utils")

_WHO: dict[str, Any] = {"library": "transformers", "tested": TESTED, "user": "drivetrain-transformers"}
_ACCELERATE: dict[str, Any] = {"library": "accelerate", "tested": TESTED_ACCELERATE, "user": "drivetrain-transformers"}

_OVERRIDDEN = (
    *("_get_dataloader", "_get_num_items_in_batch", "_has_mixed_mesh_grads", "_init_training_state"),
    *("_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler"),
    *("_move_model_to_device", "_prepare_for_training", "_save_optimizer_and_scheduler", "_save_rng_state"),
    *("_save_scaler", "create_accelerator_and_postprocess", "get_batch_samples"),
)
"""Methods of ``Trainer`` that ours overrides and that its documentation does not name."""

_REPLACED = ("Accelerator", "OPTIMIZER_NAME", "SCHEDULER_NAME", "skip_first_batches")
"""Names of the module ``transformers.trainer``."""

_TRAINER = transformers.Trainer
"""Transformers' own, also after ``drivetrain launch --trainer`` has replaced it."""

_OF_A_TRAINER = ("_loss_shifts_labels", "gather_function", "model_accepts_loss_kwargs")

NUM_GPUS = "_n_gpu"
"""Attribute behind ``TrainingArguments.n_gpu``, which has no setter."""

_TOGETHER = "_is_fsdp_managed_module"
"""Attribute of a module whose ranks generate together."""


def check() -> None:
    """Raise where the installed Transformers or Accelerate lacks a name that is overridden or replaced. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(import_module("transformers.trainer"), _REPLACED, **_WHO)
    BackendBlockedError.check_names(_TRAINER, _OVERRIDDEN, **_WHO)
    # Where a loss cannot be watched, the source of a forward that names this tells what it is a mean over.
    BackendBlockedError.check_names(transformers.PreTrainedModel, ("loss_function",), **_WHO)
    BackendBlockedError.check_names(generation, ("is_fsdp_managed_module",), **_WHO)
    for singleton in (PartialState, AcceleratorState):
        BackendBlockedError.check_names(singleton, ("_shared_state",), **_ACCELERATE)
    BackendBlockedError.check_names(operations, ("_gpu_gather", "_gpu_gather_object"), **_ACCELERATE)


def check_made(trainer: object) -> None:
    """Raise where a Trainer lacks an attribute that evaluation reads or sets. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(trainer, _OF_A_TRAINER, **_WHO)


def check_arguments(args: Any, num_gpus: int) -> None:
    """Raise where arguments do not take the number of devices that was set, so that Trainer would use DataParallel.

    Raises:
        BackendBlockedError: they count for themselves.
    """
    if args.n_gpu != num_gpus:
        raise BackendBlockedError.of_renamed(args, f"no longer keeps n_gpu in {NUM_GPUS}", **_WHO)


def generate_together(model: Any) -> None:
    """Let ``model.generate()`` wait for the other ranks that hold parts of the model.

    Raises:
        BackendBlockedError: Transformers asks otherwise, so that ranks would wait for each other for ever.
    """
    setattr(model, _TOGETHER, True)
    if not generation.is_fsdp_managed_module(model):
        raise BackendBlockedError.of_renamed(generation, f"no longer reads {_TOGETHER} of a model", **_WHO)
