"""Gradient accumulation: groups micro-batches into optimizer steps and normalises their losses.

Only :class:`Window` decides whether gradients of the current micro-batch are synchronised; prepared models,
optimizers and ``accelerator.sync_gradients`` read it there. :class:`TrainingLoop` holds the windows of one accelerator.

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

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.backend import name_of
from drivetrain.distributed import call_monitor
from drivetrain.distributed.call_monitor import Current, Place
from drivetrain.distributed.watchdog import check_collective, log_call, note_likely_cause
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.gradient_hooks import refuse_multiples
from drivetrain.loop.loose import LooseParameters
from drivetrain.loop.loss import (
    Factors,
    computes_with_data,
    count_items,
    factors_of_means,
    is_mean_of_labels,
    leaves,
    outputs_below,
    rows_of_terms,
    sums_over_batch,
    targets_of_terms,
    weighs_by_rows,
    why_no_mean_of_rows,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.backend import Backend
    from drivetrain.data.active import LoopState
    from drivetrain.data.kept_batches import KeptBatches
    from drivetrain.data.plan import Rows
    from drivetrain.loop.model import PreparedModel
    from drivetrain.loop.optimizer import PreparedOptimizer

logger = logging.getLogger(__name__)

Items = int | float | Tensor


class Window:
    """The micro-batches between two optimizer steps of one set of models. Does not communicate.

    Args:
        length: micro-batches in a full window.
        dp_size: number of data-parallel coordinates.
        dp_rank: this process's coordinate.
        models: the prepared models that share it.
        sync_each_batch: gradients are reduced at every micro-batch.
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
        self.sync_each_batch = sync_each_batch
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
                f"`with accelerator.accumulate(model):` was entered again for one batch, of which the ranks hold "
                f"different numbers of samples ({_list(rows.real)}), so that their losses cannot be weighted",
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


@final
class MicroBatch:
    """Context of one micro-batch. A class, since a generator takes twice as long in each step."""

    __slots__ = ("_loop", "_outer", "_was_open", "_window")

    def __init__(self, loop: TrainingLoop, window: Window) -> None:
        self._loop, self._window = loop, window

    def __enter__(self) -> None:
        loop, window = self._loop, self._window
        window.begin(loop.loop_state(), loop.steps)
        self._outer, loop.window = loop.window, window
        self._was_open, window.open = window.open, True
        reduces = window.closing or window.sync_each_batch  # `window.reduces`, inlined since it runs at each batch
        for model in window.models:
            model.window = window
            if model.reduces is not reduces:
                model.synchronise()

    def __exit__(self, *exc: object) -> None:
        window = self._window
        # `closing` keeps its value for a step that follows the block; reduction is switched on again.
        window.open = self._was_open
        reduces = window.reduces
        for model in window.models:
            if model.reduces is not reduces:
                model.synchronise()
        if self._outer.open:
            self._loop.window = self._outer


@final
class TrainingLoop:
    """Accumulation windows, backward, clipping and the step count of one :class:`Accelerator`.

    Each set of models named in ``accumulate`` has a window of its own, so that a generator and a discriminator do not
    count each other's micro-batches.

    Args:
        backend: the started backend.
        steps: micro-batches in a full window.
        loop_state: returns the current batch of the script's innermost loop.
        sync_with_dataloader: close the window at the loader's last batch.
        sync_each_batch: reduce gradients at every micro-batch, which spares the memory of unreduced ones.
        count_items: weigh a mean loss by the items that it is a mean over (:mod:`drivetrain.loop.loss`).
        on_step: called with ``(step, skipped)`` after each optimizer step; ``None`` for no callback.
        place: returns the batch that the script is at, on which ranks must agree.
        kept: uneven batches that the script still holds; ``None`` where no loader is prepared.
    """

    def __init__(
        self,
        backend: Backend,
        steps: int,
        loop_state: Callable[[], LoopState],
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        count_items: bool = False,
        on_step: Callable[[int, bool], None] | None = None,
        place: Callable[[], Place | None] = lambda: None,
        kept: KeptBatches | None = None,
    ) -> None:
        self.backend, self.steps = backend, steps
        self.models: list[PreparedModel] = []
        """In the order of ``prepare``."""
        self.step = 0
        """Optimizer steps so far, skipped ones too."""
        self.loop_state = loop_state if sync_with_dataloader else lambda: _endless(loop_state())
        self.place, self.kept = place, kept
        self.clipped_to = 0.0
        """The norm to which the gradients of the next step were clipped; 0 for none."""
        self._on_step, self.count_items, self._sync_each_batch = on_step, count_items, sync_each_batch
        self._looked_at: set[int] = set()
        """Models whose loss was checked for being a mean over labels."""
        self._judged: set[tuple[Any, ...]] = set()
        """Kinds of losses that were looked at for being a sum over the batch."""
        self._factors: dict[tuple[Any, ...], Factors] = {}
        """Factors of the first loss of each kind."""
        self.called: list[int] = []
        """Numbers of the models whose forwards communicate, as they were called since the last reduction; each once for
        a backward."""
        self._era = 0
        """Keeps the monitor's era of the last reduction."""
        self.loose = LooseParameters(backend)
        """Parameters that prepared optimizers step and no prepared model holds."""
        self.optimizers: list[PreparedOptimizer] = []
        """In the order of ``prepare``."""
        self.unprepared: dict[int, ReferenceType[Tensor]] = {}
        """Tensors that losses trained and that were of no prepared model and no prepared optimizer, by identity."""
        self._holds_none: dict[int, tuple[int, int]] = {}
        """Optimizers that hold none of them, by identity, with the numbers of those and of its parameters then."""
        self._searched: set[tuple[type, ...]] = set()
        self._num_backwards = 0
        self._dp_size, self._dp_rank = backend.topology.dp_size, backend.topology.dp_rank
        self.averaged = self._dp_size if backend.capabilities.averages_gradients else 1
        """Number by which the engine divides the sum of gradients; losses are multiplied by it."""
        self._linear_hooks: set[int] = set()
        self._finds_loose = self._dp_size > 1 and not backend.capabilities.pipelined
        self._windows: dict[tuple[PreparedModel, ...], Window] = {}
        self.manual = self.window = Window(steps, self._dp_size, self._dp_rank, self.models)
        """For losses outside of ``accumulate``; and the window of the current micro-batch, or else of the last one."""
        self.set_steps(steps)
        self._last_norm: Tensor | None = None
        self._joining = False
        """Ranks may make different numbers of backwards."""
        self._kept: tuple[Rows, ...] | None = None
        """Uneven batches that losses outside of every loop may be over; ``None``: to be agreed upon."""
        self._handed: _Handed | None = None
        """The last loss of the closure that runs; ``None`` where none does."""
        self._warned_length = self._warned_inputs = self._warned_rows = False

    # ---- windows ----------------------------------------------------------------------------------------------

    def accumulate(self, models: tuple[PreparedModel, ...]) -> MicroBatch:
        """One micro-batch of these models' window. See :meth:`drivetrain.Accelerator.accumulate`."""
        models = models or tuple(self.models)
        window = self._windows.get(models)
        if window is None:
            window = self._windows[models] = Window(
                self.steps, self._dp_size, self._dp_rank, models, sync_each_batch=self._sync_each_batch
            )
        return MicroBatch(self, window)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window, so that ``optimizer.step()`` acts."""
        return self.window.closing

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.window.closing = value
        for model in self.models:
            model.window.closing = value
            model.synchronise()

    @property
    def unfinished(self) -> int:
        """Micro-batches so far in an open window; 0 between two windows."""
        return max((window.position for window in self._windows.values() if not window.closing), default=0)

    def abandon_windows(self) -> None:
        """Drop the gradients of open windows after a load; the next micro-batch begins a new window."""
        for window in self._windows.values():
            window.closing = True
        self.manual.reset()
        self.loose.drop_gradients()
        for model in self.models:
            for optimizer in model.trainable.optimizers:
                model.trainable.zero_grad(optimizer)

    def set_steps(self, steps: int) -> None:
        """Change the length of windows that begin from now on."""
        if steps < 1:
            raise UsageError(f"gradient_accumulation_steps must be at least 1, not {steps}")
        self.steps = self.manual.length = steps

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        num_items: Items | None = None,
        denominator: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradients of one micro-batch's loss. See :meth:`drivetrain.Accelerator.backward`."""
        if not self.models:
            self._refuse_alone()
            log_call("backward")
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        if kwargs:
            loss = _weighted(loss, **kwargs, is_sum=num_items is not None or denominator is not None)
        if self.window.open:
            models, closes = self.window.models, self.window.closing
        else:
            # Of the models that ran forward, else of all.
            models = self.models if len(self.models) == 1 else [one for one in self.models if one.active] or self.models
            self.window, closes = self.manual, True
            self.manual.weigh_alone(self.loop_state())
            for model in models:
                model.window = self.manual
                closes = closes and not model.held
        # Ranks may make different numbers of backwards that reduce nothing.
        self._record_backward(models, (num_items is not None) + 2 * (denominator is not None), closes=closes)
        primary = models[0]
        for model in models:
            if model.active:
                primary = model
                break
        window = self.window
        scale = self._scale(loss, primary, num_items, denominator, closes=closes)
        if window.items is not None and window.guesses:
            self._refuse_hooks(models)
        window.backwards += 1
        window.backwards_here += 1
        try:
            if self.loose.parameters:
                with self.loose.backward():
                    primary.trainable.backward(loss, scale)
            else:
                primary.trainable.backward(loss, scale)
        except RuntimeError as error:
            note_likely_cause(error)
            raise
        if closes:
            self._correct(models)
            self.gradients_reduced()
        for model in self.models:
            model.active = False

    def run_closure(self, closure: Callable[[], Any]) -> tuple[Any, Any]:
        """Call the closure of ``optimizer.step``: what it returns, and that over all data-parallel ranks.

        The optimizer is given the latter: one that compares losses, as a line search does, must decide alike on every
        rank. A mean weighs as its gradients do. Collective over the data-parallel ranks.
        """
        outer, self._handed = self._handed, _Handed(None, self.window.weight, is_sum=False)
        try:
            found = closure()
            handed = self._handed
        finally:
            self._handed = outer
        apart = any(model.held or model.steps_alone for model in self.models)
        if self._dp_size == 1 or apart or not (isinstance(found, int | float) or _is_number(found)):
            return found, found
        value = torch.as_tensor(found, device=self.backend.topology.device).detach()
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        whole = handed.is_sum and found is handed.loss
        weight = torch.as_tensor(1.0 if whole else handed.weight).to(value)
        total, weights = self.backend.reduce(torch.stack([value.reshape(()) * weight, weight.reshape(())])).unbind()
        of_all = total if whole else total / weights.clamp(min=torch.finfo(weights.dtype).tiny)
        return found, of_all.to(found).reshape(found.shape) if isinstance(found, Tensor) else of_all.item()

    def _record_backward(self, models: Sequence[PreparedModel], by: int, *, closes: bool) -> None:
        """Compare a backward that reduces gradients over the ranks: batch, mode, denominator, order of models."""
        monitor = Current.monitor
        if not closes:
            log_call("backward", _SCRIPT)
        elif monitor is None:
            self.called.clear()
            check_collective("backward")
        elif any(model.steps_alone for model in models):
            self.called.clear()
            log_call("backward", _SCRIPT)
        else:
            called = tuple(self.called)
            self.called.clear()
            if sum(map(_TRAINS_OTHERS, self.models)):
                self._compare_trained()
            training = len(models) > 1 or models[0].source.training
            # A rank on which an attempt failed may have called models that others have not.
            order = called if len(self.models) > 1 and monitor.era == self._era else ()
            self._era = monitor.era
            check_collective("backward", place=self.place(), values=(by, training, order))

    def _compare_trained(self) -> None:
        """Compare over all ranks which parameters require gradients, before the engine sends those of this backward.

        Gradients of other parameters would not fit together: gloo aborts the process, NCCL waits or mixes them up.
        Collective over all ranks, through the store.

        Raises:
            CollectiveMismatchError: the script has frozen or unfrozen others on another rank.
        """
        flags = [flag for model in self.models for flag in model.trained]
        check_collective("change of requires_grad", values=(sum(flags), len(flags), hash(tuple(flags))))
        call_monitor.agree(patient=True)

    def _refuse_alone(self) -> None:
        """Refuse a backward where several processes train and no model was prepared."""
        if self._dp_size > 1:
            raise UsageError(
                f"backward() was called before accelerator.prepare(model), so that each of {self._dp_size} processes "
                "would train alone",
                cure="Prepare the model with its optimizer: model, optimizer = accelerator.prepare(model, optimizer). "
                "Where each process trains a model of its own, call loss.backward().",
            )

    def _correct(self, models: Sequence[PreparedModel]) -> None:
        """Correct the gradients of these models after a closing backward. As :meth:`Window.correction`."""
        factor = self.window.correction(self._total)
        if self.loose.parameters:
            self.loose.reduce(factor)
        if isinstance(factor, Tensor) or factor != 1.0:
            self._refuse_hooks(models)
            for model in models:
                model.trainable.scale_gradients(factor)

    def _refuse_hooks(self, models: Sequence[PreparedModel]) -> None:
        """Refuse hooks of the script for which a multiple of the gradient is not as good as the gradient."""
        # torch numbers all hooks of a process, so that parameters are asked only where one was set.
        by_items = self.window.guesses
        now = RemovableHandle.next_id, by_items
        for model in models:
            if model.hooks_tried != now:
                refuse_multiples(model.trainable.gradient_hooks(), self._linear_hooks, by_items=by_items)
                model.hooks_tried = now

    def _scale(
        self,
        loss: Tensor,
        model: PreparedModel,
        items: Items | None,
        denominator: float | Tensor | None,
        *,
        closes: bool,
    ) -> float | Tensor:
        """The factor of a loss in the current window, as an engine takes it that averages gradients or sums them.

        Collective over data-parallel ranks in a run's first window of items, and where one backward is a whole window.
        """
        if self._finds_loose and not (model.held or model.steps_alone):
            number = self._num_backwards = self._num_backwards + 1
            node = loss.grad_fn
            kind = type(node), *(type(each) for each, _ in (() if node is None else node.next_functions))
            # The first loss of each kind is looked at, then ever fewer.
            if kind not in self._searched or not number & (number - 1):
                self._searched.add(kind)
                self._find_unprepared(loss)
        window = self.window
        if denominator is not None:
            if items is not None:
                raise UsageError(
                    "backward() was given both num_items and denominator",
                    cure="Pass num_items, which are summed over the ranks, or the denominator where it is known.",
                )
            if self._handed is not None:
                self._handed = _Handed(loss, window.weight, is_sum=True)
            return window.scale_given(denominator) * self.averaged
        rows, is_sum = window.rows, items is not None
        weight, kept = None, self.kept
        if self._dp_size > 1 or (kept is not None and (kept.outputs or kept.held)):
            weight = self._weight(loss, closes=closes, by_items=is_sum or self.count_items)
        if items is None and rows is not None:
            self.refuse_sum(loss, rows, model, window.weight)
        if items is None and self.count_items and (self._dp_size > 1 or window.length > 1):
            items = self._items_of(loss)
            scale = window.scale(items, self._total, closes=closes, weight=weight) * items
        else:
            scale = window.scale(items, self._total, closes=closes, weight=weight)
        if self._handed is not None:
            by_rows = window.weight if weight is None else weight
            self._handed = _Handed(loss, by_rows if items is None else items, is_sum=is_sum)
        if model.index not in self._looked_at:
            self._look_at(loss, model, window.rows, by_items=items is not None)
        return scale if self.averaged == 1 else scale * self.averaged

    def _weight(self, loss: Tensor, *, closes: bool, by_items: bool) -> float | None:
        """The weight of a loss over other rows than those of an evenly shared batch; ``None``: the window's.

        Collective over the data-parallel ranks where they share the batch unevenly, and after a loop.
        """
        window = self.window
        rows, shares, kept = window.rows, window.shares, self.kept
        if window.after_loops:
            asks = self._finds_loose and (closes or window.open) and not self._joining
            shares = self._kept_batches() if asks else ()
        else:
            self._kept = None
        if self._dp_size > 1 and (shares or (rows is not None and not rows.even)):
            return self._weight_of(loss, shares, closes=closes, by_items=by_items)
        if kept is not None and (kept.outputs or kept.held):
            return self._weight_of_kept(loss, kept, by_items=by_items)
        return None

    def _kept_batches(self) -> tuple[Rows, ...]:
        """Return the rows of the uneven batches that were read before, if all ranks have read the same.

        A script may train on a batch after the loop that read it: it reads one batch ahead, or keeps all of them in a
        list. Collective over the data-parallel ranks in the first backward after a loop.
        """
        if self._kept is None:
            shares = sorted(self.window.shares, key=lambda share: (share.real, share.loaded))
            digest = hash(tuple((share.real, share.loaded) for share in shares)) % 2**20
            told = torch.tensor([digest, -digest], dtype=torch.float32, device=self.backend.topology.device)
            least, negated_largest = self.backend.reduce(told, "min").tolist()
            self._kept = tuple(shares) if least == -negated_largest else ()
        return self._kept

    def _weight_of(self, loss: Tensor, shares: Sequence[Rows], *, closes: bool, by_items: bool) -> float | None:
        """The weight of a loss where batches are distributed unevenly, in a unit of the batch; ``None``: the window's.

        Which batch a loss is over is read from its graph, and agreed upon: ranks hold different numbers of rows of such
        a batch, so that a tensor of another batch cannot have as many rows as this one on every rank. A loss over rows
        of no batch weighs the same on every rank, and so does one that the script has multiplied by the number of its
        rows. Collective over the data-parallel ranks.

        Raises:
            UsageError: one loss joins means over batches of several weights, or nothing tells which batch it is over.
        """
        window = self.window
        shares = shares or (() if window.rows is None else (window.rows,))
        # Ranks may make different numbers of backwards in no_sync; what an engine defers has no graph yet.
        if not (closes or window.open) or self.backend.capabilities.pipelined or loss.grad_fn is None:
            return None
        if (window.conflict and window.open and window.length > 1) or not shares:
            return None
        if any(not share.counted or share.missing for share in shares):
            return None
        terms = rows_of_terms(loss)[:_TERMS]
        said = torch.ones(_TERMS, len(shares) * _VIEWS + 5)
        numbers = [share.loaded[self._dp_rank] * times for share in shares for times in range(1, _VIEWS + 1)]
        for number, term in enumerate(terms):
            matches = [each in term.first for each in numbers]
            factor = 1.0 if term.factor is None else term.factor
            of_row = factor / next((each for each, match in zip(numbers, matches, strict=True) if match), 1)
            both = [factor, -factor, of_row, -of_row]
            said[number] = torch.tensor([*matches, not term.computes, *both], dtype=said.dtype)
        agreed = self.backend.reduce(said.to(self.backend.topology.device), "min").tolist()
        found: set[Rows | None] = set()
        unclear = repeated = False
        for *matches, is_penalty, factor, negated_factor, of_row, negated_of_row in agreed[: len(terms)]:
            over = {share for number, share in enumerate(shares) if any(matches[number * _VIEWS :][:_VIEWS])}
            # Where all ranks hold one row, some of them a repeated one, a few rows of another batch look like views.
            unclear |= len(shares) == 1 and shares[0].padded and bool(over) and not matches[0]
            # Of equal parts the mean of the means is the mean of all, as of rows of no batch.
            kinds = {None if share.even else share for share in over} or {None}
            if not _are_close(factor, -negated_factor) and _are_close(of_row, -negated_of_row):
                # The script has weighed it by its rows: a sum over all rows, times a constant.
                kinds, repeated = {None}, repeated or any(not share.real[self._dp_rank] for share in over)
            # A penalty on weights is right with each.
            if over or not is_penalty:
                found |= kinds
        if unclear or len({None if one is None else one.real for one in found}) > 1:
            if window.conflict or by_items:
                return None
            why = "adds a mean over the samples of the batch to a mean over other samples"
            cure = "Call accelerator.backward once for each of the two, or give the DataLoader drop_last=True."
            if unclear:
                why = "may be a mean over samples of the batch or over other samples"
                cure = "Give the DataLoader drop_last=True."
            raise UsageError(
                f"the ranks hold {_list(shares[0].real)} samples of this batch, and the loss {why}, so that no weight "
                "of the ranks' losses gives the loss of one process",
                cure=cure,
            )
        share = next(iter(found), None)
        if share is None:
            return 0.0 if repeated else window.share_of_batch
        return share.weight(self._dp_rank) * window.share_of_batch

    def _weight_of_kept(self, loss: Tensor, kept: KeptBatches, *, by_items: bool) -> float | None:
        """The weight of a loss over an uneven batch that the script kept from an earlier loop; ``None``: the window's.

        Not collective: which batch it is over is known by memory, of what the models were given or of the labels.

        Raises:
            UsageError: one loss joins means over such a batch and over others.
        """
        if loss.grad_fn is None:
            return None
        found: set[Rows] = set()
        others = False
        if kept.outputs:
            nodes, others = outputs_below(loss, kept.outputs)
            found = {kept.outputs.pop(node) for node in nodes}
        if not found:
            unknown = []
            for node, target in targets_of_terms(loss):
                share = None if target is None else kept.rows_of(target)
                if share is None:
                    unknown.append(node)
                else:
                    found.add(share)
            others = bool(found) and any(map(computes_with_data, unknown))
        if not found:
            return None
        share = next(iter(found))
        if others or len({one.real for one in found}) > 1:
            if by_items:
                return None
            raise UsageError(
                f"no weight makes this loss that of one process: the ranks hold {_list(share.real)} samples of a "
                "batch that was kept from an earlier loop, and it joins means over them and others",
                cure="Call backward once for the loss of the batch and once for that of others. Or: Give the "
                "DataLoader drop_last=True.",
            )
        return share.weight(self._dp_rank) * self.window.share_of_batch

    def find_loose(self) -> None:
        """Find what prepared optimizers step and no prepared model holds. Collective over all ranks."""
        self.loose.update(self.optimizers, self.models)

    def _find_unprepared(self, loss: Tensor) -> None:
        """Record tensors that a loss trains but no prepared object holds: their gradients are not reduced.

        Raises:
            UsageError: neither the prepared models nor the prepared optimizers have anything to train, so that the loss
                trains nothing else.
        """
        parameters = [one for model in self.models for one in model.trainable.module.parameters()]
        if not any(one.requires_grad for one in (*parameters, *self.loose.parameters)):
            raise UsageError(
                "no parameter of a prepared model requires a gradient, so that this loss trains other tensors, whose "
                "gradients would be those of this rank's samples alone",
                cure=_LOOSE,
            )
        known = set(map(id, parameters))
        found = {id(leaf): leaf for leaf in leaves(loss) if id(leaf) not in known and leaf not in self.loose}
        self.unprepared |= {number: ref(leaf) for number, leaf in found.items()}
        inputs = [tuple(leaf.shape) for leaf in found.values() if not isinstance(leaf, nn.Parameter)]
        if inputs and not self._warned_inputs and not self.backend.topology.rank:
            self._warned_inputs = True
            logger.warning(
                "backward() was given a loss that reaches a leaf of shape %s, such as an input, that nothing prepared "
                "holds. If its .grad is read: it is that of this rank's own loss, a mean over 1/%d of the rows, times "
                "what that weighs in its accumulation window. torch.autograd.grad(loss, leaf), called before "
                "backward(), gives it without that weight.",
                inputs[0],
                self._dp_size,
            )

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether :meth:`refuse_unprepared` has looked at an optimizer that was not prepared."""
        return not self._finds_loose or id(optimizer) in self._holds_none

    def refuse_unprepared(self, optimizer: Optimizer) -> None:
        """Raise where an optimizer is about to step a tensor of nothing prepared that a loss of this loop trained."""
        if id(optimizer) not in self._holds_none:
            # It may step what losses of a known kind reach since a while.
            self._searched.clear()
        looked_at = len(self.unprepared), sum([len(group["params"]) for group in optimizer.param_groups])
        if self._holds_none.get(id(optimizer)) == looked_at:
            return
        parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        own = [
            each
            for each in parameters
            if id(each) in self.unprepared and self.unprepared[id(each)]() is not None and each not in self.loose
        ]
        if not own:
            self._holds_none[id(optimizer)] = looked_at
        for each in own:
            if each.grad is not None and not any(model.trainable.shares([each]) for model in self.models):
                raise UsageError(
                    f"{type(optimizer).__name__} was not prepared and steps a tensor of shape {tuple(each.shape)} "
                    "that is of no prepared model: its gradient is that of this rank's samples alone",
                    cure=_LOOSE,
                )

    def gradients_reduced(self) -> None:
        """Synchronise buffers, after a backward that reduces gradients. Collective over data-parallel ranks."""
        # Of every model: one may have run forward for another's loss.
        for model in self.models:
            if model.buffers is not None and not model.held and not model.steps_alone:
                model.buffers.window_closed()

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context in which ranks may run out of batches at different times. Collective over all ranks at the end.

        The number of steps is then that of the ranks that trained longest, whose parameters all have. Were it another
        on each, a later save would wait for ranks that have made it.
        """
        self.loose.refuse_in("join_uneven_inputs")
        with ExitStack() as stack:
            for model in self.models:
                if model.buffers is not None:
                    stack.enter_context(model.buffers.apart())
            self._joining = True
            stack.callback(setattr, self, "_joining", False)
            yield
        if self._dp_size > 1:
            step = torch.tensor(self.step, device=self.backend.topology.device)
            self.step = int(self.backend.reduce(step, "max").item())

    def _items_of(self, loss: Tensor) -> Items:
        if self.backend.capabilities.pipelined:
            raise UnsupportedError(
                f"count_items reads from a loss what it is a mean over, and a pipeline of {name_of(self.backend)} "
                "computes the loss in backward() only",
                cure="Leave count_items out, and pass a sum with the number of its items: "
                "accelerator.backward(loss_sum, num_items=n).",
            )
        return count_items(loss)

    def _look_at(self, loss: Tensor, model: PreparedModel, rows: Rows | None, *, by_items: bool) -> None:
        """Warn once per model of hooks on activations, and of a loss that is no mean of what its rows give each."""
        self._looked_at.add(model.index)
        if model.backward_hooks is not None:
            self._say_hooked(model.backward_hooks.found(), model)
            model.backward_hooks = None
        if by_items or self._dp_size * self.steps == 1 or self.backend.topology.rank:
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
                self.steps,
            )
            return
        number = 0 if rows is None or not rows.counted else rows.real[self._dp_rank]
        if number > 1 and loss.grad_fn is not None and (why := why_no_mean_of_rows(loss, number)):
            logger.warning(
                "backward() was given a loss that is not the mean of what the %d rows of this batch give each: %s. "
                "Over %d data-parallel rank(s) and windows of %d micro-batch(es) such numbers are averaged, which is "
                "not that of all rows. A mean over some of the rows, or one with weights, is right as a sum: "
                "backward(loss_sum, num_items=n). A function f of the mean m is right as m * f'(M), where M is "
                "accelerator.reduce(m.detach(), 'mean'): for a root, m / (2 * M.sqrt()).",
                number,
                why,
                self._dp_size,
                self.steps,
            )

    def _say_hooked(self, found: Sequence[str], model: PreparedModel) -> None:
        if found:
            logger.warning(
                "What flows back through %s is looked at (%s). There gradients are those of the mean over this "
                "process's rows, %d times as large as on one process, and times what a micro-batch weighs in its "
                "window: a limit or a norm means something else. Multiply a limit by accelerator.num_processes; or "
                "use hooks of parameters and accelerator.clip_grad_value_, which see the gradients of one process.",
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
        if ranks == 1 or self.count_items or not rows.counted or rows.real != rows.loaded or number < 1:
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
        factors = factors_of_means(loss, own, rows.total)
        weighted = weighs_by_rows(self._factors.setdefault(kind[:4], factors), factors, ranks)
        by_constants = *kind[:4], 0 if weight == 1.0 else number
        judged = number < 2 or by_constants in self._judged
        self._judged |= {by_constants} if number > 1 else set()
        if weighted == "by something" and not self._warned_rows and not self.backend.topology.rank:
            self._warned_rows = True
            logger.warning(
                "backward() was given a mean multiplied by the number of this rank's rows (%d of %d). Losses are "
                "averaged over %d data-parallel ranks: that is the number of one process if the script divides by rows "
                "of this rank, and 1/%d of it if it divides by those of all. Then multiply by the number of ranks, as "
                "a factor of its own: loss * len(x) / n * accelerator.num_processes.",
                own,
                rows.total,
                ranks,
                ranks,
            )
        if weighted == "by all" or (not judged and sums_over_batch(loss, number, ranks)):
            self._judged -= {kind, by_constants}
            whole = "accelerator.num_processes" if self.backend.topology.world_size == ranks else str(ranks)
            raise UsageError(
                f"the loss is a sum over this rank's {rows.real[self._dp_rank]} rows, and losses are averaged over "
                f"{ranks} ranks, so that gradients would be 1/{ranks} of those of one process",
                cure="Divide by the number of rows (loss / len(x), reduction='mean'); or say what it is a sum over: "
                "num_items=n divides by the n of all ranks; or, for the sum over all ranks itself, multiply the loss "
                f"by {whole}.",
            )

    def _total(self, items: Items) -> Tensor:
        """Sum of an item count over the data-parallel ranks, 0-d on the device. Collective over them."""
        count = torch.as_tensor(items, device=self.backend.topology.device).detach().reshape(())
        return self.backend.reduce(count, "sum")

    # ---- steps ------------------------------------------------------------------------------------------------

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        """Count a step of this optimizer. A lazy device is given what was recorded."""
        self.step += 1
        self.backend.sync()
        if self.kept is not None and self.kept.outputs:
            self.kept.outputs.clear()
        manual = self.manual
        if manual.backwards and not self.window.open:
            # Outside of `accumulate` the script ends a window by stepping; its losses were divided as in a full one.
            if manual.backwards != self.steps > 1 and manual.items is None and not self._warned_length:
                self._warn_of_length(manual.backwards)
            manual.reset()
        if self._on_step is not None:
            self._on_step(self.step, optimizer.step_was_skipped)

    def _warn_of_length(self, found: int) -> None:
        self._warned_length = True
        logger.warning(
            "An optimizer stepped after %d backward call(s) outside of `with accelerator.accumulate(model):`, "
            "while each loss was divided by gradient_accumulation_steps=%d. Use accumulate, or set it to 1.",
            found,
            self.steps,
        )

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip where a window ends. See :meth:`drivetrain.Accelerator.clip_grad_norm_`."""
        if not self.window.closing:
            return torch.zeros((), device=self.backend.topology.device) if self._last_norm is None else self._last_norm
        capabilities = self.backend.capabilities
        (log_call if capabilities.replicated else check_collective)("clip_grad_norm_")
        if max_norm < _NO_CLIPPING:
            self.clipped_to = max_norm
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.loose.parameters and any(each in self.loose for each in parameters):
            return self._clip_loose(parameters, max_norm, norm_type)
        owners = self.models if len(self.models) == 1 else self._owners(parameters)
        if len(owners) > 1 and not capabilities.optimizer_spans_models:
            raise UnsupportedError(
                "these parameters belong to several models, which this backend clips one by one",
                cure="Call clip_grad_norm_ once for each model.",
            )
        self._last_norm = owners[0].trainable.clip_grad_norm(parameters, max_norm, norm_type)
        return self._last_norm

    def _clip_loose(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients of which some are of no prepared model, by one norm of all."""
        others = [each for each in parameters if each not in self.loose]
        norm, owners = None, self.models[:1]
        if others:
            owners = self._owners(others)
            if len(owners) > 1:
                raise UnsupportedError(
                    "these parameters belong to several models, and some to none",
                    cure="Call clip_grad_norm_ once for each model, and once for the parameters of none.",
                )
            # Nothing is clipped by an infinite norm.
            norm = owners[0].trainable.clip_grad_norm(others, math.inf, norm_type)
        self._last_norm = total = self.loose.clipped(parameters, norm, max_norm, norm_type)
        if norm is not None and total > max_norm:
            owners[0].trainable.clip_grad_norm(others, float(norm * max_norm / (total + 1e-6)), norm_type)
        return total

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Clamp gradient elements where a window ends."""
        if not self.window.closing:
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.loose.parameters:
            with torch.no_grad():
                for each in parameters:
                    if each in self.loose and each.grad is not None:
                        each.grad.clamp_(-clip_value, clip_value)
            parameters = [each for each in parameters if each not in self.loose]
            if not parameters:
                return
        self._owners(parameters)[0].trainable.clip_grad_value(parameters, clip_value)

    def _owners(self, parameters: Sequence[Tensor]) -> list[PreparedModel]:
        """Models that hold these parameters, in order of ``prepare``."""
        if len(self.models) == 1:
            return self.models
        wanted = {id(parameter) for parameter in parameters}
        found = [
            model
            for model in self.models
            if any(id(parameter) in wanted for parameter in model.trainable.module.parameters())
        ]
        if not found:
            raise UsageError(
                "these parameters belong to no prepared model",
                cure="Pass parameters of a model that went through accelerator.prepare.",
            )
        return found

    def release(self) -> None:
        """Release the engines; the modules stay usable."""
        self.loose.release()
        for model in self.models:
            model.trainable.release()

    def forget(self) -> None:
        """Remove all models and optimizers, and what was found of them.

        Checks and warnings that occur once for a model are repeated for the next.
        """
        for kept in (self.models, self.optimizers, self.called, self.unprepared, self._windows):
            kept.clear()
        self._factors.clear()
        if self.kept is not None:
            self.kept.outputs.clear()
        for known in (self._looked_at, self._judged, self._searched, self._holds_none, self._linear_hooks):
            known.clear()
        self.manual.reset()
        self.window, self._last_norm, self.clipped_to = self.manual, None, 0.0
        self._num_backwards = 0
        self._warned_length = self._warned_inputs = self._warned_rows = False


class _Handed(NamedTuple):
    """A loss that ``backward`` was given.

    Args:
        loss: ``None`` before the first.
        weight: of it as a mean in a mean over ranks: the number of items, or a number by its rows.
        is_sum: it is a sum over items.
    """

    loss: Tensor | None
    weight: Items
    is_sum: bool


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


_LOOSE = (
    "Prepare the optimizer that steps it, which averages its gradient over the ranks: optimizer = "
    "accelerator.prepare(optimizer). Where each rank has its own, call loss.backward() instead of "
    "accelerator.backward(loss)."
)


_TRAINS_OTHERS = methodcaller("trains_others")

_SCRIPT = 4
"""Frames from :func:`log_call` out to the script, which calls ``Accelerator.backward``."""

_NO_CLIPPING = 1e6
"""Threshold from which a call only measures the norm, as scripts do by 1e9 or infinity, perhaps on one rank only."""

_TERMS, _VIEWS = 16, 4
"""Kinds of terms of a loss that are looked at; and how often a loss may have each row of a batch, as in views of it."""


def _endless(loop: LoopState) -> LoopState:
    """A loop state whose end closes no window."""
    return loop._replace(is_last=False, unknown="")


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _weighted(loss: Tensor, gradient: Tensor | None = None, *, is_sum: bool, **others: Any) -> Tensor:
    """The number whose gradient ``loss.backward(gradient)`` computes.

    Raises:
        UnsupportedError: there are other arguments of ``loss.backward``.
        UsageError: the weights are not those of a mean, so that ranks with other numbers of rows could not be joined.
    """
    if others:
        _refuse_arguments(others)
    if gradient is None:
        return loss
    if not loss.dim():
        return loss * gradient
    if is_sum:
        return (loss * gradient).sum()
    total = float(gradient.detach().sum())
    if not math.isclose(total, 1.0, rel_tol=1e-3):
        raise UsageError(
            f"the weights in backward(loss, gradient=weights) add up to {total:g}, and a loss of several processes is "
            "a mean: its weights add up to 1 on each of them",
            cure="Write accelerator.backward(loss, gradient=weights / weights.sum()), or accelerator.backward((loss * "
            "weights).sum(), num_items=n) with the number of items that a sum is divided by.",
        )
    return (loss * gradient * loss.numel()).mean()


def _refuse_arguments(names: Iterable[str]) -> NoReturn:
    cures = {
        "retain_graph": "Add up the losses of one forward: accelerator.backward(first + second).",
        "create_graph": "Compute the gradient with torch.autograd.grad(loss, inputs, create_graph=True), and call "
        "accelerator.backward with the loss that contains it.",
        "inputs": "Set requires_grad_(False) on the parameters that this loss shall not train, before the forward.",
    }
    raise UnsupportedError(
        f"backward() does not take {', '.join(sorted(names))} with a prepared model",
        cure=" ".join(dict.fromkeys(cures.get(name, cures["create_graph"]) for name in sorted(names))),
    )
