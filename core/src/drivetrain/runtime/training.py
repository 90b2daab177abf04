"""The loop's centre: accumulation windows, backward, clipping and the count of steps, for all models of one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from drivetrain.backend import Backend
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.runtime.last_call import note
from drivetrain.runtime.records import Record
from drivetrain.runtime.watchdog import meet
from drivetrain.runtime.windows import Items, Window

if TYPE_CHECKING:
    from drivetrain.runtime.optimizer import PreparedOptimizer

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
        batch, is_last = trainer.batch_state()
        trainer.sync_gradients = closing = window.begin(batch, is_last)
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
        batch_state: ``(serial, is_last)`` of the batch that the innermost loader yielded.
        sync_with_dataloader: close the window at the loader's last batch.
        sync_each_batch: reduce gradients at every micro-batch, which spares the memory of unreduced ones.
        on_step: called with ``(step, skipped)`` after each optimizer step; ``None`` when nobody listens.
    """

    def __init__(
        self,
        backend: Backend,
        steps: int,
        batch_state: Callable[[], tuple[int, bool]],
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        on_step: Callable[[int, bool], None] | None = None,
    ) -> None:
        self.backend = backend
        self.steps: int
        self.records: list[Record] = []
        self.sync_gradients = True
        self.step = 0
        """Optimizer steps so far, skipped ones too."""
        self.sync_each_batch = sync_each_batch
        self.batch_state = batch_state if sync_with_dataloader else _endless
        self.open: tuple[Window, Sequence[Record]] | None = None
        """Window and models of the micro-batch that the script is in."""
        self._on_step = on_step
        self._windows: dict[tuple[int, ...], Window] = {}
        self._dp_size = backend.topology.dp_size
        self._manual = Window(steps, self._dp_size)
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
                window = records[0].window = Window(self.steps, self._dp_size)
        else:
            key = tuple(record.index for record in records)
            window = self._windows.setdefault(key, Window(self.steps, self._dp_size))
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
            window, records = self._manual, self._participants()
            closes = True
            for record in records:
                record.ready = True
                if record.held:
                    closes = False
        # One that reduces nothing may stay on its rank, and ranks then make different numbers of them.
        (meet if closes else note)("backward")
        scale = window.scale(num_items, self._total)
        primary = records[0]
        for record in records:
            if record.active:
                primary = record
                break
        primary.trainable.backward(loss, scale)
        if closes:
            factor = window.correction(self._total)
            if isinstance(factor, Tensor) or factor != 1.0:
                for record in records:
                    record.trainable.scale_gradients(factor)
        for record in self.records:
            record.active = False

    def _participants(self) -> list[Record]:
        """Models that a loss outside of ``accumulate`` can depend on: those that ran forward, else all."""
        if len(self.records) == 1:
            return self.records
        return [record for record in self.records if record.active] or self.records

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
        if norm_type != 2.0 and not self.backend.capabilities.other_norms:
            raise UnsupportedError(
                f"{type(self.backend).__name__} clips by the 2-norm only, not by norm_type={norm_type}",
                cure="Leave norm_type at 2.",
            )
        if len(owners) > 1 and not self.backend.capabilities.optimizer_spans_models:
            raise UnsupportedError(
                "these parameters belong to several models, which this backend clips one by one",
                cure="Call clip_grad_norm_ once for each model.",
            )
        return owners[0].trainable.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp gradient elements."""
        if not self.backend.capabilities.clip_by_value:
            raise UnsupportedError(
                f"{type(self.backend).__name__} cannot clip by value",
                cure="Use clip_grad_norm_.",
            )
        self.owners(parameters)[0].trainable.clip_grad_value(parameters, clip_value)

    def release(self) -> None:
        """Let go of the engines; the modules stay usable."""
        for record in self.records:
            record.trainable.release()


def _endless() -> tuple[int, bool]:
    """A loader whose end closes no window."""
    return 0, False
