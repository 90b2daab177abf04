"""``train_step``: one whole optimizer step as a function, the explicit form of the loop on every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.runtime.optimizer import PreparedOptimizer, Verdict
from drivetrain.runtime.records import Record
from drivetrain.runtime.training import Trainer
from drivetrain.runtime.watchdog import meet
from drivetrain.runtime.windows import Items

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class TrainStepOutput:
    """What one training step did, the same on every rank.

    Args:
        loss: (sum over all data-parallel ranks and micro-batches of the loss) / denominator, 0-d, detached.
        grad_norm: norm before clipping, 0-d, when ``max_norm`` was given.
        verdicts: of each optimizer's step: whether it was skipped, or what knows it once the device is done.
    """

    loss: Tensor
    grad_norm: Tensor | None
    verdicts: tuple[bool | Verdict, ...] = ()

    @property
    def skipped(self) -> bool:
        """The update was not applied. Waits for a lazy device."""
        return any(each if isinstance(each, bool) else each() for each in self.verdicts)


def model_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is given to the model unless the caller says otherwise.

    A mapping as keywords, of a tuple or list the first element, anything else as it is.
    """
    if isinstance(batch, Mapping):
        return (), {str(key): value for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return (batch[0],), {}
    return (batch,), {}


def train_step(
    trainer: Trainer,
    record: Record,
    optimizers: Sequence[PreparedOptimizer],
    batches: Any,
    loss_fn: LossFunction,
    *,
    num_items: Callable[[Any], Items] | None = None,
    inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] = model_inputs,
    max_norm: float | None = None,
) -> TrainStepOutput:
    """Forward and backward of a window's micro-batches, clip, step, zero. Collective over all ranks.

    See :meth:`drivetrain.Accelerator.train_step`.
    """
    meet("train_step")
    several = isinstance(batches, list) and bool(batches) and all(_is_batch(batch) for batch in batches)
    window = list(batches) if several else [batches]
    topology, backend = trainer.backend.topology, trainer.backend
    if num_items is None:
        denominator = torch.tensor(float(topology.dp_size * len(window)), device=topology.device)
    else:
        counts = [torch.as_tensor(num_items(batch), device=topology.device).reshape(()) for batch in window]
        denominator = backend.reduce(torch.stack(counts).sum(), "sum").clamp(min=1)
    if not optimizers:
        raise UsageError(
            "train_step needs the model's optimizer", cure="Prepare the model together with its optimizer."
        )
    for optimizer in optimizers:
        record.trainable.zero_grad(optimizer.optimizer)
    record.ready = True
    local = record.trainable.forward_backward(
        [(*inputs(batch), batch) for batch in window], loss_fn, 1.0 / denominator
    )
    loss = backend.reduce(local, "sum") / denominator
    norm = None
    if max_norm is not None:
        parameters = [parameter for parameter in record.trainable.module.parameters() if parameter.requires_grad]
        norm = record.trainable.clip_grad_norm(parameters, max_norm)
    for optimizer in optimizers:
        optimizer.step()
    verdicts = tuple(optimizer.unsettled or optimizer.step_was_skipped for optimizer in optimizers)
    for optimizer in optimizers:
        record.trainable.zero_grad(optimizer.optimizer)
    record.active = False
    return TrainStepOutput(loss, norm, verdicts)


def _is_batch(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping)
