"""Counts the micro-batches between two optimizer steps, and normalises their losses.

Only :class:`Window` decides whether gradients of the current micro-batch are synchronised; prepared models,
optimizers and ``accelerator.sync_gradients`` read it there.

Gradients are kept in units of ``1 / denominator``. While a window is open the denominator may be a guess (its length is
not known before the last batch, its number of items not before the last micro-batch); after the closing backward
:meth:`Window.correction` gives the factor that corrects it. In a window of one micro-batch its items are summed before
the backward, so that hooks on gradients are given what they are given on one process.

A mean loss weighs by the samples that it is a mean over, which the loader knows without communication: a rank whose
last batch is shorter than the others' weighs less in the sum over ranks, a shorter global batch weighs less in its
window, and a rank that holds only a repeated sample, to take part in a step, weighs nothing. Where all batches of a
window are of one size, each of these weights is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.data.active import LoopState
    from drivetrain.data.plan import Rows
    from drivetrain.loop.gradient_edits import GradientEdits
    from drivetrain.loop.model import PreparedModel

Items = int | float | Tensor
"""Number of items that a loss is a sum over."""


class Window:
    """The micro-batches between two optimizer steps of one set of models. Does not communicate.

    Args:
        length: micro-batches in a full window.
        dp_size: number of data-parallel coordinates.
        dp_rank: this process's coordinate.
        models: the prepared models that share it.
        sync_each_batch: gradients are reduced at every micro-batch, of this window or of all.
    """

    def __init__(
        self,
        length: int,
        dp_size: int,
        dp_rank: int = 0,
        models: Sequence[PreparedModel] = (),
        *,
        sync_each_batch: bool = False,
    ) -> None:
        self.length, self.dp_size, self.dp_rank, self.models = length, dp_size, dp_rank, models
        self.sync_each_batch = self.always_reduces = sync_each_batch
        self.number = 0
        """Windows that have begun, of those that are counted."""
        self.edits: GradientEdits | None = None
        """Watches the script's changes of gradients; ``None`` in most windows."""
        self.position = 0
        """Micro-batches begun in this window."""
        self.closing = True
        """The current micro-batch is the window's last, so that optimizers step after it."""
        self.open = False
        """The script is inside a micro-batch of this window."""
        self.backwards = 0
        """Backward calls in this window."""
        self.backwards_here = 0
        """Backward calls in the current micro-batch."""
        self.denominator: float | Tensor = 1.0
        self.weight = 1.0
        """Weight of a mean loss of the current micro-batch on this rank."""
        self.conflict = ""
        """Why a mean loss of the current micro-batch has no weight."""
        self.shares: tuple[Rows, ...] = ()
        """Rows of this loop's loaders, if :attr:`conflict` is set; outside of loops, of batches read before."""
        self.after_loops = False
        """The current micro-batch is outside of every loop over a prepared loader, of which there are some."""
        self._share = 1.0
        """The current global batch in units of the window's first one."""
        self._covered = 0.0
        """Global batches so far, in that unit."""
        self.rows: Rows | None = None
        """Rows of the current batch, if losses are means over its rows."""
        self._first: Rows | None = None
        self.items: Items | None = None
        """Items that the losses of this window are sums over, so far; ``None`` for means."""
        self._dropped: set[int] = set()
        """Optimizers, by identity, of which gradients of these items were dropped."""
        self._normalised_by = ""
        """Denominator of the losses of this window: ``"samples"``, ``"num_items"`` or a ``"denominator"``."""
        self._exact = False
        """The denominator is the number of items of all losses so far."""
        self._previous_items: Tensor | None = None
        self._batch: int | None = None
        self._steps_in_batch = self._steps_in_previous_batch = 0

    @property
    def reduces(self) -> bool:
        """Whether gradients of a backward are reduced over the ranks now, unless the script disables that."""
        return self.closing or self.sync_each_batch or not self.open

    @property
    def may_drop_gradients(self) -> bool:
        """Whether ``zero_grad`` may clear gradients now, outside of an open window."""
        if not self.open:
            return self.closing
        return self.backwards == 0 or (self.closing and self.backwards_here > 0)

    def begin(self, loop: LoopState, length: int) -> None:
        """Start a micro-batch; decides :attr:`closing`.

        A script may take several micro-steps on one batch, so "the last batch" alone does not close a window: its last
        micro-step does, which is known from how many the previous batch had.

        Args:
            loop: the current batch of the innermost loop.
            length: of the window, if it begins here.

        Raises:
            UsageError: whether the window closes here is unknown; or this is another part of a batch that the ranks
            share unevenly.
        """
        if self.closing:
            self.reset()
            self.length = length
        batch, is_last_batch, rows, unknown, self.conflict, beyond, self.shares, self.after_loops = loop
        if batch != self._batch:
            self._batch, self._steps_in_previous_batch, self._steps_in_batch = batch, self._steps_in_batch, 0
        self._steps_in_batch += 1
        self.position += 1
        self.backwards_here = 0
        if rows is not self.rows or (self.position == 1 and rows is not self._first):
            self._weigh(rows)
        self._covered += self._share
        if unknown and self.position < self.length:
            raise UsageError(
                f"{unknown}: whether the accumulation window ends here, after {self.position} of {self.length} "
                "micro-batches, depends on whether the loop ends",
                cure="Set ends_loop = True on the loader whose end ends the loop, and ends_loop = False on one that is "
                "begun again.",
            )
        if rows is not None and not rows.even and self._steps_in_batch > 1 and self.position > 1:
            raise UsageError(
                "`with accelerator.accumulate(model):` was entered again for one batch, of which the ranks hold "
                f"different numbers of samples ({', '.join(map(str, rows.real))}), so that their losses cannot be "
                "weighted",
                cure="Give the DataLoader drop_last=True, or use one batch of the loader for each micro-batch.",
            )
        self.closing = self.position >= self.length or (
            is_last_batch and self._steps_in_batch >= max(self._steps_in_previous_batch, 1)
        )
        if self.closing and beyond is not None and self._first is not None and self.position < self.length:
            # Other ranks' windows continue with a batch of which this rank has no part.
            self._covered += beyond.total / self._first.total

    def _weigh(self, rows: Rows | None) -> None:
        """Set the weights of a batch that differs from the one before."""
        self.rows = rows
        if self.position == 1:
            self._first = rows
        first = self._first
        if rows is None or first is None:
            self.weight = self._share = 1.0
        else:
            self._share = rows.total / first.total
            self.weight = rows.weight(self.dp_rank) * self._share

    def weigh_alone(self, loop: LoopState) -> None:
        """Set the weight of a loss outside of ``accumulate``, whose window is its batch."""
        rows = self.rows = loop.rows
        self.conflict, self.shares, self.after_loops = loop.conflict, loop.shares, loop.after_loops
        self.weight = 1.0 if rows is None or rows.even else rows.weight(self.dp_rank)

    @property
    def share_of_batch(self) -> float:
        """The current global batch in units of the window's first one; 1 outside of ``accumulate``."""
        return self._share if self.open else 1.0

    @property
    def guesses(self) -> bool:
        """Whether gradients are scaled by an estimated number of items."""
        return self.items is not None and not self._exact

    def reset(self) -> None:
        """Reset after the window is finished."""
        self.position = self.backwards = self.backwards_here = 0
        self.items, self._normalised_by = None, ""
        self._dropped.clear()
        self._covered = 0.0

    def forget_items(self, optimizers: Iterable[Optimizer]) -> None:
        """Reset the count of items after the gradients of all optimizers were dropped.

        Closures drop them and run backward again, and so do scripts that run a trial batch before training.
        """
        if self.items is None:
            return
        self._dropped.update(map(id, optimizers))
        if all(id(each) in self._dropped for model in self.models for each in model.trainable.optimizers):
            self.items, self._normalised_by = None, ""
            self._dropped.clear()

    def _refuse_mixture(self, by: str) -> NoReturn:
        word = by if self._normalised_by == "samples" else self._normalised_by
        said = "a denominator" if word == "denominator" else word
        nothing = " (0 for a loss that counts no items)" if word == "num_items" else ""
        raise UsageError(
            f"backward was called with {said} and without it in one accumulation window",
            cure=f"Pass {word} with every loss of a window{nothing}, or with none.",
        )

    def scale_given(self, denominator: float | Tensor) -> float | Tensor:
        """Like :meth:`scale`, for a loss with a given denominator: no weight, nothing to communicate or correct.

        Raises:
            UsageError: other losses of the window came without it.
        """
        if self._normalised_by not in ("", "denominator"):
            self._refuse_mixture("denominator")
        self._normalised_by = "denominator"
        return 1.0 / denominator

    def scale(
        self,
        items: Items | None,
        total: Callable[[Items], Tensor],
        *,
        closes: bool = False,
        weight: float | None = None,
    ) -> float | Tensor:
        """The ``scale`` by which a loss is multiplied.

        Args:
            items: what this loss is a sum over, or ``None`` for a mean.
            total: sum of ``items`` over the data-parallel ranks (collective); called once, in a run's first window, and
                where a window's first backward closes it.
            closes: this backward reduces gradients.
            weight: of this loss, where it is over other rows than those of the batch.

        Raises:
            UsageError: one window mixes losses with and without ``num_items``, or a mean loss has no weight.
        """
        if items is None:
            if self.conflict and weight is None:
                raise UsageError(
                    f"{self.conflict}, so that no weight of their losses gives the loss of one big batch",
                    cure="Give the DataLoaders drop_last=True, or pass a sum: accelerator.backward(loss_sum, "
                    "num_items=n).",
                )
            if not self._normalised_by:
                self._normalised_by = "samples"
                self.denominator = float(self.dp_size * self.length)
            elif self._normalised_by != "samples":
                self._refuse_mixture("samples")
            return (self.weight if weight is None else weight) / self.denominator
        if self._normalised_by not in ("", "num_items"):
            self._refuse_mixture("num_items")
        self._normalised_by = "num_items"
        # Without a weight this rank holds a repeated sample, to take part in the step.
        counts = 1.0 if (self.weight if weight is None else weight) else 0.0
        items = items if counts else items * 0
        self._exact = closes and self.items is None
        if self._exact:
            self.denominator = self._previous_items = total(items).clamp(min=1.0)
        elif self.items is None:
            if self._previous_items is None:
                self._previous_items = total(items)
            # A power of two does not change the digits of the result.
            self.denominator = 2.0 ** round(math.log2(max(float(self._previous_items), 1.0)))
        self.items = items if self.items is None else self.items + items
        return counts / self.denominator

    def correction(self, total: Callable[[Items], Tensor]) -> float | Tensor:
        """Factor for all gradients after a closing backward; 1.0 when the denominator was right.

        Args:
            total: as in :meth:`scale`; called once per closing backward of a window with items.
        """
        if self._normalised_by == "denominator" or (self.items is not None and self._exact):
            return 1.0
        truth: float | Tensor
        if self.items is not None:
            truth = self._previous_items = total(self.items).clamp(min=1.0)
        elif self.position == 0 or self._covered == self.length:
            # The length was right, or the script counts the micro-batches itself.
            return 1.0
        else:
            truth = self.dp_size * self._covered
        factor = self.denominator / truth
        self.denominator = truth
        return factor
