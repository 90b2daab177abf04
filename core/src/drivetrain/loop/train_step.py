"""``train_step``: one whole optimizer step as a function, an explicit form of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from drivetrain.data.source import num_rows
from drivetrain.distributed.watchdog import check_collective
from drivetrain.errors import UsageError
from drivetrain.loop.accumulation import TrainingLoop
from drivetrain.loop.model import PreparedModel
from drivetrain.loop.optimizer import PendingStep, PreparedOptimizer
from drivetrain.loop.shared_memory import check_still_frozen
from drivetrain.loop.window import Items

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class TrainStepOutput:
    """Result of one training step, the same on every rank.

    Args:
        loss: (sum over all data-parallel ranks and micro-batches of the loss) / denominator, 0-d, detached.
        grad_norm: norm before clipping, 0-d, when ``max_norm`` was given.
        steps: for each optimizer whether its step was skipped, or a function that waits for the device and returns it.
    """

    loss: Tensor
    grad_norm: Tensor | None
    steps: tuple[bool | PendingStep, ...] = ()

    @property
    def skipped(self) -> bool:
        """Whether the update was not applied. Waits for a lazy device."""
        return any(each if isinstance(each, bool) else each() for each in self.steps)


def model_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments for a batch, by default.

    A mapping is passed as keywords; of a tuple or list the first element; anything else unchanged.
    """
    if isinstance(batch, Mapping):
        return (), {str(key): value for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return (batch[0],), {}
    return (batch,), {}


def train_step(
    loop: TrainingLoop,
    model: PreparedModel,
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
    check_collective("train_step", place=loop.place(), values=(max_norm or 0.0,))
    if isinstance(batches, list | tuple) and not batches:
        raise UsageError(
            "train_step was given no micro-batch", cure="Pass a batch, or a list of at least one micro-batch."
        )
    several = isinstance(batches, list) and bool(batches) and all(_is_batch(batch) for batch in batches)
    window = list(batches) if several else [batches]
    topology, backend = loop.backend.topology, loop.backend
    weight = _weight(loop, window, by_items=num_items is not None)
    if num_items is None:
        denominator = torch.tensor(float(topology.dp_size * len(window)), device=topology.device)
    else:
        counts = [torch.as_tensor(num_items(batch), device=topology.device).reshape(()) for batch in window]
        denominator = backend.reduce(torch.stack(counts).sum() * weight, "sum").clamp(min=1)
    if not optimizers:
        raise UsageError(
            "train_step needs the model's optimizer", cure="Prepare the model together with its optimizer."
        )
    for optimizer in optimizers:
        model.trainable.zero_grad(optimizer.optimizer)
    loop.check_hooks([model])
    model.window = loop.manual
    rows = loop.loop_state().rows
    if num_items is None and rows is not None:
        checks = loop.checks
        loss_fn = _Judged(loss_fn, lambda loss, batch: checks.refuse_sum(loss, rows, model, weight, num_rows(batch)))
    loose = loop.loose if loop.loose.parameters else None
    if model.stay_frozen:
        check_still_frozen(model.source, model.stay_frozen)
    if model.former is not None and model.former.moved_later:
        model.former.look()
    with model.numbers or nullcontext(), model.running(), nullcontext() if loose is None else loose.backward():
        local = model.trainable.forward_backward(
            [(*inputs(batch), batch) for batch in window], loss_fn, loop.averaged * weight / denominator
        )
    if loose is not None:
        loose.reduce()
    loop.gradients_reduced()
    loss = backend.reduce(local * weight, "sum") / denominator
    loop.note_loss(loss)
    norm = None
    if max_norm is not None:
        parameters = [parameter for parameter in model.trainable.module.parameters() if parameter.requires_grad]
        norm = model.trainable.clip_grad_norm(parameters, max_norm)
    for optimizer in optimizers:
        optimizer.step()
    steps = tuple(optimizer.pending or optimizer.step_was_skipped for optimizer in optimizers)
    for optimizer in optimizers:
        model.trainable.zero_grad(optimizer.optimizer)
    model.active = False
    return TrainStepOutput(loss, norm, steps)


@final
class _Judged:
    """Wrapper of a loss function that checks its results. Engines distinguish loss functions by their code."""

    def __init__(self, loss_fn: LossFunction, look: Callable[[Tensor, Any], None]) -> None:
        self._loss_fn, self._look = loss_fn, look
        self.__code__ = getattr(loss_fn, "__code__", loss_fn)

    def __call__(self, output: Any, batch: Any) -> Tensor:
        loss = self._loss_fn(output, batch)
        self._look(loss, batch)
        return loss


def _weight(loop: TrainingLoop, window: Sequence[Any], *, by_items: bool) -> float:
    """Weight of this rank's losses where the loop's current batch is distributed unevenly.

    Raises:
        UsageError: the batches of a list need several weights, or the loss is weighed by items that are not
        counted.
    """
    if loop.count_items and not by_items:
        raise UsageError(
            "train_step divides by the number of items before it computes the loss, so that count_items cannot read it "
            "from the loss",
            cure="Pass num_items, and a loss_fn that returns a sum.",
        )
    state = loop.loop_state()
    if state.conflict and not by_items:
        raise UsageError(
            f"{state.conflict}, so that no weight of their losses gives the loss of one big batch",
            cure="Give the DataLoaders drop_last=True, or pass num_items.",
        )
    rows, topology = state.rows, loop.backend.topology
    if loop.kept is not None and loop.kept.held and (rows is None or rows.even):
        rows = loop.kept.rows_of(window) or rows
    uneven = rows is not None and not rows.even
    if len(window) > 1 and not by_items and (uneven or len({num_rows(batch) for batch in window}) > 1):
        raise UsageError(
            "these batches hold different numbers of samples, and train_step has one weight for all of them",
            cure="Give the DataLoader drop_last=True, or pass num_items and a loss_fn that returns a sum.",
        )
    if rows is None or not uneven:
        return 1.0
    mine = rows.real[topology.dp_rank]
    if not by_items:
        return rows.weight(topology.dp_rank)
    if len(window) > 1 and not all(rows.real):
        raise UsageError(
            "some ranks have no sample of the last of these batches, and train_step has one weight for all of them",
            cure="Give the DataLoader drop_last=True, or pass one batch at a time.",
        )
    return float(mine > 0)


def _is_batch(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping)
