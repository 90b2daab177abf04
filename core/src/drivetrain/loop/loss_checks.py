"""Looks at losses 1, 2, 4, 8, ... of each kind, and warns of or refuses those that ranks cannot average."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.distributed.call_monitor import Current
from drivetrain.distributed.process_control import num_processes_was_read
from drivetrain.errors import UsageError
from drivetrain.loop.loss import (
    Factors,
    constants_of,
    factors_of_means,
    how_rows_meet_in_model,
    is_mean_of_labels,
    is_multiplied_by,
    is_of_all_ranks,
    sums_over_batch,
    weighs_by_rows,
    why_no_mean_of_rows,
)

if TYPE_CHECKING:
    from drivetrain.data.plan import Rows
    from drivetrain.loop.model import PreparedModel
    from drivetrain.topology import Topology

logger = logging.getLogger(__name__)

_SUM = (
    "A mean over some of the rows, or one with weights, is right as a sum: backward(loss_sum, num_items=n). A function "
    "f of the mean m is right as m * f'(M), where M is accelerator.reduce(m.detach(), 'mean'): for a root, "
    "m / (2 * M.sqrt())."
)
_DIVIDED = (
    " Where {:.6g} is the number of items of all ranks divided by the ranks, as all_reduce(n) / world_size gives it, "
    "the loss is right as it is."
)
_GATHER = (
    "Rows that meet in the loss are those of this process: before, join outputs and targets with those of the other "
    "processes by accelerator.gather(outputs, gradients=True), and let each compute the loss of all rows."
)
_NORMALISE = (
    "Weights such as advantages, and targets, are normalised by numbers of all rows: every = "
    "accelerator.gather(weights), then (weights - every.mean()) / every.std(), or weights / every.mean()."
)


_MOST_LOOKS = 1024
"""Losses of a model after which none is looked at any more."""
_SERIALS = count()
"""Tell the models of one accelerator, and of one phase of it, from those of others; the same on every rank."""


@final
class LossChecks:
    """Checks of losses that each kind of loss, and each model, passes once.

    Args:
        topology: of the run.
        num_samples: returns the samples of the data set that the current batch is of; 0 where that is not known.
        count_items: means are weighed by the items that they are means over.
    """

    def __init__(self, topology: Topology, num_samples: Callable[[], int], *, count_items: bool) -> None:
        self._topology, self._num_samples, self._count_items = topology, num_samples, count_items
        self._dp_size, self._dp_rank = topology.dp_size, topology.dp_rank
        self._looked_at: dict[int, int] = {}
        """Number of losses that each model has had, until one of them was warned of."""
        self._first_rows: dict[int, int] = {}
        """Rows of the first batch of each model, 0 where they are not known."""
        self._rows_meet: set[int] = set()
        """Models that were said to join rows in forward."""
        self._judged: set[tuple[Any, ...]] = set()
        """Kinds of losses that were looked at for being a sum over the batch."""
        self._factors: dict[tuple[Any, ...], Factors] = {}
        """Factors of the first loss of each kind."""
        self._warned_rows = False
        self._serial = next(_SERIALS)

    def forget(self) -> None:
        """Repeat all checks with the next loss."""
        for known in (self._looked_at, self._first_rows, self._rows_meet, self._judged, self._factors):
            known.clear()
        self._warned_rows = False
        self._serial = next(_SERIALS)

    def look_at(
        self, loss: Tensor, model: PreparedModel, rows: Rows | None, *, steps: int, by_items: bool
    ) -> None:
        """Warn once per model of hooks on activations, of rows that meet, and of a loss that is no mean over its rows.

        Of a model's losses 1, 2, 4, 8, ... are looked at, until one was warned of: padding may begin in a later batch.

        Args:
            loss: of the model.
            model: that it belongs to.
            rows: of the batch; ``None`` where they are not known.
            steps: micro-batches in a full window.
            by_items: the loss is a sum over items.
        """
        looks = self._looked_at[model.index] = self._looked_at.get(model.index, 0) + 1
        if looks & (looks - 1) or looks > _MOST_LOOKS:
            return
        if looks == 1:
            self._say_world_size(loss, model, rows)
        if model.backward_hooks is not None:
            self._say_hooked(model.backward_hooks.found(), model)
            model.backward_hooks = None
        if by_items or self._dp_size * steps == 1:
            return
        if self._topology.rank:
            self._compare_constants(loss, model, rows, looks)
            return
        number = 0 if rows is None or not rows.counted else rows.real[self._dp_rank]
        if self._first_rows.setdefault(model.index, number) != number:
            return  # A short batch, or one of another loader.
        if number > 1 and model.index not in self._rows_meet:
            self._say_how_rows_meet(loss, model, number, steps)
        if is_of_all_ranks(loss):
            return
        if is_mean_of_labels(loss, None if rows is None else rows.real[self._dp_rank]):
            logger.warning(
                "backward() was given a mean over labels (as a model called with `labels` returns it) or one weighted "
                "by class (cross_entropy(weight=w)). Over %d data-parallel rank(s) and windows of %d micro-batch(es), "
                "each batch's mean weighs by its samples, so that a label weighs more in a batch that has fewer of "
                "them, or lighter ones. Where their numbers differ, count_items: true in the configuration, "
                "Accelerator(count_items=True) or backward(loss_sum, num_items=n) gives the gradients of one big "
                "batch.",
                self._dp_size,
                steps,
            )
            self._looked_at[model.index] = _MOST_LOOKS
        elif number and loss.grad_fn is not None and (found := why_no_mean_of_rows(loss, number, self._dp_size)):
            logger.warning(
                "backward() was given a loss that is not the mean of what the %d row(s) of this batch give each: %s. "
                "Over %d data-parallel rank(s) and windows of %d micro-batch(es) such numbers are averaged, which is "
                "not that of all rows. %s%s",
                number,
                found.why,
                self._dp_size,
                steps,
                _GATHER if found.rows_meet else _NORMALISE if found.normalised else _SUM,
                _DIVIDED.format(found.divided_by) if found.divided_by else "",
            )
            self._looked_at[model.index] = _MOST_LOOKS
        else:
            self._compare_constants(loss, model, rows, looks)

    def _compare_constants(self, loss: Tensor, model: PreparedModel, rows: Rows | None, looks: int) -> None:
        """Warn once if ranks multiply losses over as many rows by different numbers."""
        monitor = Current.monitor
        if monitor is None or self._dp_size == 1 or rows is None or not rows.counted or len(set(rows.real)) > 1:
            return
        if numbers := constants_of(loss):
            monitor.tell_alike(
                f"loss/{self._serial}/{model.index}",
                looks,
                numbers,
                f"backward() was given losses of {model.plain_class.__name__} that ranks multiply by other numbers, "
                "each over as many rows. They are averaged, which is not the loss of one process. A number that is "
                "found from the batch, as a running mean, a weight of a task or pos_weight, is found from all rows "
                "with accelerator.reduce(number, 'mean'), or from what accelerator.gather returns.",
            )

    def _say_world_size(self, loss: Tensor, model: PreparedModel, rows: Rows | None) -> None:
        """Warn once where a loss is multiplied by all processes, of which some share a model and see the same rows."""
        world = self._topology.world_size
        if world == self._dp_size or not num_processes_was_read():
            return
        number = 0 if rows is None or not rows.counted else rows.real[self._dp_rank]
        example = model.trainable.example_loss(loss, number) if number else None
        if example is not None and not self._topology.rank and is_multiplied_by(example[0], world):
            logger.warning(
                "backward() was given a loss that is multiplied by %d, which accelerator.num_processes is. Losses are "
                "averaged over data-parallel processes, of which there are %d: the others share a model with one of "
                "them. Where the sum over all rows is meant, multiply by accelerator.data_parallel_size, which is "
                "right under every backend.",
                world,
                self._dp_size,
            )

    def _say_how_rows_meet(self, loss: Tensor, model: PreparedModel, rows: int, steps: int) -> None:
        # Batch norms were named in prepare.
        named = any(isinstance(layer, _BatchNorm) for layer in model.source.modules())
        if loss.grad_fn is not None and (why := how_rows_meet_in_model(loss, rows, batch_norms=not named)):
            self._rows_meet.add(model.index)
            logger.warning(
                "%s joins the %d rows of this batch in forward: %s. Over %d data-parallel rank(s) and windows of %d "
                "micro-batch(es) those are the rows of one process and one micro-batch: training is not that of one "
                "process with the whole batch. Where rows are to meet, join them with those of the other processes by "
                "accelerator.gather(rows, gradients=True), or use torch.nn.BatchNorm with sync_batch_norm: true; "
                "where they are not, a layer takes another dim for the batch: torch.nn.MultiheadAttention and "
                "TransformerEncoderLayer need batch_first=True.",
                model.plain_class.__name__,
                rows,
                why,
                self._dp_size,
                steps,
            )

    def _say_hooked(self, found: Sequence[str], model: PreparedModel) -> None:
        if found:
            logger.warning(
                "What flows back through %s is looked at (%s). There gradients are those of the mean over this "
                "process's rows, %d times as large as on one process, and times what a micro-batch weighs in its "
                "window: a limit or a norm means something else. Multiply a limit by accelerator.data_parallel_size; "
                "or use hooks of parameters and accelerator.clip_grad_value_, which see the gradients of one process.",
                model.plain_class.__name__,
                ", ".join(found),
                self._dp_size,
            )

    def refuse_sum(
        self, loss: Tensor, rows: Rows, model: PreparedModel, weight: float, number: int | None = None
    ) -> None:
        """Check each kind of loss once, and refuse a sum over the batch, which an average over ranks would scale.

        Args:
            loss: of the current batch.
            rows: of it.
            model: that it belongs to.
            weight: of a mean over these rows. Where it is not 1, a constant divisor is no number of rows.
            number: of rows, where the loss is of a part of the batch.
        """
        number, ranks = number or rows.real[self._dp_rank], self._dp_size
        # count_items refuses a sum itself.
        if ranks == 1 or self._count_items or not rows.counted or rows.real != rows.loaded or number < 1:
            return
        own = number
        example = model.trainable.example_loss(loss, number)
        if example is None:
            return
        loss, number = example
        node = loss.grad_fn
        edges = node.next_functions if node is not None else ()
        inner = edges[0][0] if edges else None
        # A loss function is one kind of node whether it returns a mean or a sum.
        reductions = getattr(node, "_saved_reduction", 0), getattr(inner, "_saved_reduction", 0)
        # Of each size that a batch has the first is looked at.
        kind = model.index, type(node), type(inner), reductions, weight == 1.0, own
        if kind in self._judged:
            return
        self._judged.add(kind)
        if is_of_all_ranks(loss):
            return
        factors = factors_of_means(loss, own, rows.total)
        weighted = weighs_by_rows(self._factors.setdefault(kind[:4], factors), factors, ranks)
        by_constants = *kind[:4], 0 if weight == 1.0 else number
        judged = number < 2 or by_constants in self._judged
        self._judged |= {by_constants} if number > 1 else set()
        if weighted == "by something" and not self._warned_rows and not self._topology.rank:
            self._warned_rows = True
            logger.warning(
                "backward() was given a mean multiplied by the number of this rank's rows (%d of %d). Losses are "
                "averaged over %d data-parallel ranks: that is the number of one process if the script divides by rows "
                "of this rank, and 1/%d of it if it divides by those of all. Then multiply by the number of ranks, as "
                "a factor of its own: loss * len(x) / n * accelerator.data_parallel_size.",
                own,
                rows.total,
                ranks,
                ranks,
            )
        if weighted == "by all" or (not judged and sums_over_batch(loss, number, ranks, self._num_samples())):
            self._judged -= {kind, by_constants}
            raise UsageError(
                f"the loss is a sum over this rank's {rows.real[self._dp_rank]} rows, and losses are averaged over "
                f"{ranks} ranks, so that gradients would be 1/{ranks} of those of one process",
                cure="Divide by the number of rows (loss / len(x), reduction='mean'); or say what it is a sum over: "
                "num_items=n divides by the n of all ranks; or, for the sum over all ranks itself, multiply the loss "
                "by accelerator.data_parallel_size.",
            )
