"""The accumulation window: which micro-batches make one optimizer step, and what their loss is divided by.

Gradients are kept in units of ``1 / denominator``. While a window is open the denominator may be a guess (its length is
not known before the last batch, its number of items not before the last micro-batch); after the closing backward
:meth:`Window.correction` gives the factor that turns the guess into the truth.

A mean loss weighs by the samples that it is a mean over, which the loader knows without communication: a rank whose
last batch is shorter than the others' weighs less in the sum over ranks, a shorter global batch weighs less in its
window, and a rank that holds only a repeated sample, to take part in a step, weighs nothing. Where all batches of a
window are of one size, each of these weights is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from drivetrain.backend import Trainable
    from drivetrain.data.active import LoopState
    from drivetrain.data.plan import Rows

Items = int | float | Tensor


class Window:
    """The micro-batches between two optimizer steps of one set of models. Pure bookkeeping, no communication.

    Args:
        length: micro-batches in a full window.
        dp_size: number of data-parallel coordinates.
        dp_rank: this process's coordinate.
    """

    def __init__(self, length: int, dp_size: int, dp_rank: int = 0) -> None:
        self.length, self.dp_size, self.dp_rank = length, dp_size, dp_rank
        self.position = 0
        """Micro-batches begun in this window."""
        self.closing = True
        """The current micro-batch is the window's last."""
        self.backwards = 0
        """Backward calls in this window."""
        self.backwards_here = 0
        """Backward calls in the current micro-batch."""
        self.denominator: float | Tensor = 1.0
        self.weight = 1.0
        """Of a mean loss of the current micro-batch on this rank."""
        self.conflict = ""
        """Why a mean loss of the current micro-batch has no weight."""
        self._share = 1.0
        """The current global batch in units of the window's first one."""
        self._covered = 0.0
        """Global batches so far, in that unit."""
        self._rows: Rows | None = None
        self._first: Rows | None = None
        self._items: Items | None = None
        self._by_items: bool | None = None
        self._previous_items: Tensor | None = None
        self._batch: int | None = None
        self._steps_in_batch = self._steps_in_previous_batch = 0

    def begin(self, loop: LoopState) -> bool:
        """Start a micro-batch; decides and returns :attr:`closing`.

        A script may take several micro-steps on one batch, so "the last batch" alone does not close a window: its last
        micro-step does, which is known from how many the previous batch had.

        Args:
            loop: the batch that the innermost loop is at.

        Raises:
            UsageError: the window may have to close here, and nobody knows; or this is another part of a batch that
                the ranks share unevenly.
        """
        if self.closing:
            self.reset()
        batch, is_last_batch, rows, unknown, self.conflict, beyond = loop
        if batch != self._batch:
            self._batch, self._steps_in_previous_batch, self._steps_in_batch = batch, self._steps_in_batch, 0
        self._steps_in_batch += 1
        self.position += 1
        self.backwards_here = 0
        if rows is not self._rows or (self.position == 1 and rows is not self._first):
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
                f"a second micro-step on one batch, which the ranks share unevenly ({_list(rows.real)} samples): the "
                "parts of it that they train on do not match",
                cure="Give the DataLoader drop_last=True, or make each micro-step a batch of its own.",
            )
        self.closing = self.position >= self.length or (
            is_last_batch and self._steps_in_batch >= max(self._steps_in_previous_batch, 1)
        )
        if self.closing and beyond is not None and self._first is not None and self.position < self.length:
            # Other ranks' windows go on with a batch that this rank has no part of.
            self._covered += beyond.total / self._first.total
        return self.closing

    def _weigh(self, rows: Rows | None) -> None:
        """Set the weights of a batch that is not like the one before."""
        self._rows = rows
        if self.position == 1:
            self._first = rows
        first = self._first
        if rows is None or first is None:
            self.weight = self._share = 1.0
        else:
            self.weight = rows.real[self.dp_rank] * self.dp_size / first.total
            self._share = rows.total / first.total

    def weigh_alone(self, loop: LoopState) -> None:
        """Set the weight of a loss outside of ``accumulate``, whose batch stands for itself."""
        rows, self.conflict = loop.rows, loop.conflict
        even = rows is None or rows.even
        self.weight = 1.0 if even or rows is None else rows.real[self.dp_rank] * self.dp_size / rows.total

    def reset(self) -> None:
        """Forget the finished window."""
        self.position = self.backwards = self.backwards_here = 0
        self.closing = False
        self._items = self._by_items = None
        self._covered = 0.0

    def scale(self, items: Items | None, total: Callable[[Items], Tensor]) -> float | Tensor:
        """Note one backward and return the ``scale`` that its loss is multiplied with.

        Args:
            items: what this loss is a sum over, or ``None`` for a mean.
            total: sum of ``items`` over the data-parallel ranks (collective); called once, in a run's first window.

        Raises:
            UsageError: one window mixes losses with and without ``num_items``, or a mean loss has no weight.
        """
        self.backwards += 1
        self.backwards_here += 1
        if self.conflict and items is None:
            raise UsageError(
                f"{self.conflict}, so that no weight makes one loss of them the loss of one big batch",
                cure="Give the DataLoaders drop_last=True, or pass a sum with num_items to backward().",
            )
        if items is None and self._by_items is False:
            return self.weight / self.denominator
        if items is not None and not self.weight:
            # This rank holds a repeated sample, to take part in the step.
            items = items * 0
        by_items = items is not None
        if self._by_items is None:
            self._by_items = by_items
            if not by_items:
                self.denominator = float(self.dp_size * self.length)
            else:
                if self._previous_items is None:
                    self._previous_items = total(items if items is not None else 0)
                # A power of two changes no digit of the result, whatever it is.
                self.denominator = 2.0 ** round(math.log2(max(float(self._previous_items), 1.0)))
        elif self._by_items != by_items:
            raise UsageError(
                "backward was called with num_items and without it in one accumulation window",
                cure="Pass num_items with every loss of a window (0 for a loss that counts no items), or with none.",
            )
        if items is not None:
            self._items = items if self._items is None else self._items + items
            return (1.0 if self.weight else 0.0) / self.denominator
        return self.weight / self.denominator

    def correction(self, total: Callable[[Items], Tensor]) -> float | Tensor:
        """Factor for all gradients after a closing backward; 1.0 when the denominator was right.

        Args:
            total: as in :meth:`scale`; called once per closing backward of a window with items.
        """
        if self._items is None and (self.position == 0 or self._covered == self.length):
            # The length was right, or the script counts the micro-batches itself.
            return 1.0
        if self._items is not None:
            items = total(self._items).clamp(min=1.0)
            self._previous_items = items
            factor: float | Tensor = self.denominator / items
            self.denominator = items
            return factor
        truth = self.dp_size * self._covered
        factor = self.denominator / truth
        self.denominator = truth
        return factor

    @property
    def counts_items(self) -> bool:
        """The losses of this window are sums over items."""
        return self._items is not None

    @property
    def may_drop_gradients(self) -> bool:
        """Whether ``zero_grad`` now clears what is finished, rather than what this window has gathered."""
        return self.backwards == 0 or (self.closing and self.backwards_here > 0)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def loop_forward_backward(
    trainable: Trainable,
    micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    scale: float | Tensor,
) -> Tensor:
    """:meth:`Trainable.forward_backward` for engines that run forward at once: one micro-batch after the other."""
    total: Tensor | None = None
    for index, (args, kwargs, batch) in enumerate(micro_batches):
        trainable.synchronise_gradients(index == len(micro_batches) - 1)
        loss = loss_fn(trainable.forward(*args, **kwargs), batch)
        trainable.backward(loss, scale)
        detached = loss.detach()
        total = detached if total is None else total + detached
    if total is None:
        raise UsageError("a training step needs at least one micro-batch")
    return total
