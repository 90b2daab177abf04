"""The loop's centre: accumulation windows, backward, clipping and the count of steps, for all models of one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.data.active import LoopState
from drivetrain.distributed.watchdog import meet, note
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.accumulation import Items, Window
from drivetrain.loop.items import count_items, is_mean_of_labels
from drivetrain.loop.model import Record
from drivetrain.loop.sums import sums_over_batch

if TYPE_CHECKING:
    from drivetrain.loop.optimizer import PreparedOptimizer

logger = logging.getLogger(__name__)


@final
class MicroBatch:
    """Context of one micro-batch. A class of its own since a generator costs twice as much on each step."""

    __slots__ = ("_before", "_quiet", "_records", "_trainer")

    def __init__(self, trainer: Trainer, records: Sequence[Record]) -> None:
        self._trainer, self._records = trainer, records

    def __enter__(self) -> None:
        trainer, records = self._trainer, self._records
        window = trainer.window_of(records)
        trainer.sync_gradients = closing = window.begin(trainer.loop_state())
        self._quiet = quiet = not (closing or trainer.sync_each_batch)
        for record in records:
            record.ready = closing
            if quiet:
                record.trainable.synchronise_gradients(False)
        self._before, trainer.open = trainer.open, (window, records)

    def __exit__(self, *exc: object) -> None:
        self._trainer.open = self._before
        if self._quiet:
            # `ready` keeps its value for a step that follows the block; communication must not stay off.
            for record in self._records:
                record.trainable.synchronise_gradients(not record.held)


@final
class Trainer:
    """Owns the accumulation windows of one :class:`Accelerator` and drives its trainables through them.

    Each set of models named in ``accumulate`` has a window of its own, so that a generator and a discriminator do not
    count each other's micro-batches.

    Args:
        backend: the started backend.
        steps: micro-batches in a full window.
        loop_state: the batch that the script's innermost loop is at.
        sync_with_dataloader: close the window at the loader's last batch.
        sync_each_batch: reduce gradients at every micro-batch, which spares the memory of unreduced ones.
        count_items: weigh a mean loss by the items that it is a mean over (:mod:`drivetrain.loop.items`).
        on_step: called with ``(step, skipped)`` after each optimizer step; ``None`` when nobody listens.
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
    ) -> None:
        self.backend = backend
        self.steps: int
        self.records: list[Record] = []
        self.sync_gradients = True
        self.step = 0
        """Optimizer steps so far, skipped ones too."""
        self.sync_each_batch = sync_each_batch
        self.loop_state = loop_state if sync_with_dataloader else lambda: _endless(loop_state())
        self.open: tuple[Window, Sequence[Record]] | None = None
        """Window and models of the micro-batch that the script is in."""
        self._on_step, self.count_items = on_step, count_items
        self._looked_at: set[int] = set()
        """Models whose loss was looked at for being a mean over labels."""
        self._judged: set[tuple[int, type, type | None]] = set()
        """Kinds of losses that were looked at for being a sum over the batch."""
        self._windows: dict[tuple[int, ...], Window] = {}
        self._dp_size = backend.topology.dp_size
        # An engine that computes a loss in parts has no graph of it here; count_items refuses a sum itself.
        self._judges = self._dp_size > 1 and not count_items and not backend.capabilities.pipelined
        self._manual = Window(steps, self._dp_size, backend.topology.dp_rank)
        self.set_steps(steps)
        self._manual.closing = False
        self._warned_length = False

    # ---- windows ----------------------------------------------------------------------------------------------

    def accumulate(self, records: Sequence[Record]) -> MicroBatch:
        """One micro-batch of these models' window. See :meth:`drivetrain.Accelerator.accumulate`."""
        return MicroBatch(self, records or self.records)

    @property
    def unfinished(self) -> int:
        """Micro-batches whose gradients wait in an open window for the others; 0 between two windows."""
        windows = [*self._windows.values(), *(record.window for record in self.records)]
        return max((window.position for window in windows if window is not None and not window.closing), default=0)

    def abandon_windows(self) -> None:
        """Drop what open windows have gathered: other parameters were loaded, and the next micro-batch begins anew."""
        for window in (*self._windows.values(), *(record.window for record in self.records)):
            if window is not None:
                window.closing = True
        self._manual.reset()
        for record in self.records:
            for optimizer in record.trainable.optimizers:
                record.trainable.zero_grad(optimizer)

    def set_steps(self, steps: int) -> None:
        """Change the length of windows that begin from now on."""
        if steps < 1:
            raise UsageError(f"gradient_accumulation_steps must be at least 1, not {steps}")
        self.steps = self._manual.length = steps

    def window_of(self, records: Sequence[Record]) -> Window:
        """The window that these models share; its length follows ``steps`` between two windows."""
        if len(records) == 1:
            window = records[0].window
            if window is None:
                window = records[0].window = Window(self.steps, self._dp_size, self._manual.dp_rank)
        else:
            key = tuple(record.index for record in records)
            window = self._windows.setdefault(key, Window(self.steps, self._dp_size, self._manual.dp_rank))
        if window.closing:
            window.length = self.steps
        return window

    def may_drop_gradients(self, records: Sequence[Record]) -> bool:
        """Whether ``zero_grad`` on these models' optimizer acts now."""
        if self.open is not None:
            window, mine = self.open
            if records[0] in mine:
                return window.may_drop_gradients
        return records[0].ready

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, num_items: Items | None = None, **kwargs: Any) -> None:
        """Add the gradients of one micro-batch's loss. See :meth:`drivetrain.Accelerator.backward`."""
        if not self.records:
            note("backward")
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        if kwargs:
            raise UnsupportedError(
                f"backward() does not take {', '.join(sorted(kwargs))} with a prepared model",
                cure="Call torch.autograd.grad yourself for a gradient that is not a training step.",
            )
        if self.open is not None:
            window, records = self.open
            closes = window.closing
        else:
            window, records, closes = self._outside()
        # One that reduces nothing may stay on its rank, and ranks then make different numbers of them.
        (meet if closes else note)("backward")
        primary = _first_active(records)
        if num_items is None and self._judges:
            node = loss.grad_fn
            edges = node.next_functions if node is not None else ()
            kind = primary.index, type(node), type(edges[0][0]) if edges else None
            if kind not in self._judged:
                self._refuse_sum(loss, kind)
        if num_items is None and self.count_items and (self._dp_size > 1 or window.length > 1):
            num_items = self._items_of(loss)
            scale = window.scale(num_items, self._total) * num_items
        else:
            scale = window.scale(num_items, self._total)
        if primary.index not in self._looked_at:
            self._look_at(loss, primary, by_items=num_items is not None)
        primary.trainable.backward(loss, scale)
        if closes:
            factor = window.correction(self._total)
            if isinstance(factor, Tensor) or factor != 1.0:
                for record in records:
                    record.trainable.scale_gradients(factor)
            self.window_closed()
        for record in self.records:
            record.active = False

    def _outside(self) -> tuple[Window, Sequence[Record], bool]:
        """Window and models of a loss outside of ``accumulate``, and whether its gradients are reduced."""
        window, records, closes = self._manual, self._participants(), True
        window.weigh_alone(self.loop_state())
        for record in records:
            record.ready = True
            if record.held:
                closes = False
        return window, records, closes

    def window_closed(self) -> None:
        """Gradients were reduced: a point that every rank reaches. Collective over the data-parallel ranks."""
        # Of every model: one may have run forward for another's loss.
        for record in self.records:
            if record.buffers is not None and not record.held and not record.steps_alone:
                record.buffers.window_closed()

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Ranks may run out of batches at different times in here. Collective over all ranks at the end."""
        with ExitStack() as stack:
            for record in self.records:
                if record.buffers is not None:
                    stack.enter_context(record.buffers.apart())
            yield

    def _participants(self) -> list[Record]:
        """Models that a loss outside of ``accumulate`` can depend on: those that ran forward, else all."""
        if len(self.records) == 1:
            return self.records
        return [record for record in self.records if record.active] or self.records

    def _items_of(self, loss: Tensor) -> Items:
        if self.backend.capabilities.pipelined:
            raise UnsupportedError(
                f"{type(self.backend).__name__} computes a loss in parts, after backward() was called: count_items "
                "cannot see what it is a mean over",
                cure="Compute a sum outside of the model: accelerator.backward(loss_sum, num_items=n).",
            )
        return count_items(loss)

    def _look_at(self, loss: Tensor, record: Record, *, by_items: bool) -> None:
        """Say once, for each model, what a mean over labels means where there are several of them."""
        self._looked_at.add(record.index)
        if by_items or self._dp_size * self.steps == 1 or self.backend.topology.rank:
            return
        rows = self.loop_state().rows
        if is_mean_of_labels(loss, None if rows is None else rows.real[self._manual.dp_rank]):
            logger.warning(
                "backward() was given a mean over labels (as a model called with `labels` returns it). Over %d "
                "data-parallel rank(s) and windows of %d micro-batch(es), each batch's mean weighs by its samples, so "
                "that a label weighs more in a batch that has fewer of them. Where their numbers differ, count_items: "
                "true in the configuration, Accelerator(count_items=True) or backward(loss_sum, num_items=n) gives the "
                "gradients of one big batch.",
                self._dp_size,
                self.steps,
            )

    def _refuse_sum(self, loss: Tensor, kind: tuple[int, type, type | None]) -> None:
        """Look once at each kind of loss for being a sum over the batch, of which an average over ranks is a part."""
        rows, place, ranks = self.loop_state().rows, self._manual.dp_rank, self._dp_size
        if rows is None or not rows.counted or rows.real != rows.loaded:
            return
        number = rows.real[place]
        if number < 2:
            return
        self._judged.add(kind)
        if sums_over_batch(loss, number, ranks):
            self._judged.discard(kind)
            whole = "accelerator.num_processes" if self.backend.topology.world_size == ranks else str(ranks)
            raise UsageError(
                f"the loss is a sum over this rank's {number} rows, and backward() averages over {ranks} ranks, so "
                f"that gradients would be 1/{ranks} of those of one process",
                cure="Divide by the number of rows (loss / len(x), reduction='mean'); or say what it is a sum over: "
                "accelerator.backward(loss, num_items=n) divides by the n of all ranks; or, for the sum over all ranks "
                f"itself, accelerator.backward(loss * {whole}).",
            )

    def _total(self, items: Items) -> Tensor:
        """Sum of an item count over the data-parallel ranks, 0-d on the device. Collective over them."""
        count = torch.as_tensor(items, device=self.backend.topology.device).detach().reshape(())
        return self.backend.reduce(count, "sum")

    # ---- steps ------------------------------------------------------------------------------------------------

    def stepped(self, records: Sequence[Record], optimizer: PreparedOptimizer) -> None:
        """Note an optimizer step of these models. A lazy device is given what was recorded."""
        self.step += 1
        self.backend.sync()
        manual = self._manual
        if self.open is None and manual.backwards:
            # Outside of `accumulate` the script ends a window by stepping; its losses were divided as in a full one.
            if manual.backwards != self.steps > 1 and not manual.counts_items and not self._warned_length:
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

    def owners(self, parameters: Sequence[Tensor]) -> list[Record]:
        """Models that hold these parameters, in order of ``prepare``."""
        if len(self.records) == 1:
            return self.records
        wanted = {id(parameter) for parameter in parameters}
        found = [
            record
            for record in self.records
            if any(id(parameter) in wanted for parameter in record.trainable.module.parameters())
        ]
        if not found:
            raise UsageError(
                "these parameters belong to no prepared model",
                cure="Pass parameters of a model that went through accelerator.prepare.",
            )
        return found

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip by the norm over all these parameters together; the norm before clipping. Collective."""
        if self.backend.capabilities.replicated:
            note("clip_grad_norm_")
        else:
            meet("clip_grad_norm_")
        owners = self.owners(parameters)
        if len(owners) > 1 and not self.backend.capabilities.optimizer_spans_models:
            raise UnsupportedError(
                "these parameters belong to several models, which this backend clips one by one",
                cure="Call clip_grad_norm_ once for each model.",
            )
        return owners[0].trainable.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp gradient elements."""
        self.owners(parameters)[0].trainable.clip_grad_value(parameters, clip_value)

    def release(self) -> None:
        """Let go of the engines; the modules stay usable."""
        for record in self.records:
            record.trainable.release()


def _first_active(records: Sequence[Record]) -> Record:
    for record in records:  # a generator costs twice as much on each step
        if record.active:
            return record
    return records[0]


def _endless(loop: LoopState) -> LoopState:
    """A loop whose end closes no window."""
    return loop._replace(is_last=False, unknown="")
