"""Accumulates gradients: groups micro-batches into optimizer steps.

:class:`TrainingLoop` holds the windows (:mod:`drivetrain.loop.window`) of one accelerator, weighs the losses of their
micro-batches, and corrects and clips their gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.backend import name_of
from drivetrain.distributed import call_monitor
from drivetrain.distributed.call_monitor import Current, Place
from drivetrain.distributed.watchdog import check_collective, log_call, note_likely_cause
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop import gradient_edits
from drivetrain.loop.gradient_hooks import Cause, refuse_multiples
from drivetrain.loop.loose import LooseParameters
from drivetrain.loop.loss import count_items, leaves
from drivetrain.loop.loss_checks import LossChecks
from drivetrain.loop.loss_weights import LossWeights
from drivetrain.loop.window import Items, Window

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.backend import Backend
    from drivetrain.data.active import LoopState
    from drivetrain.data.kept_batches import KeptBatches
    from drivetrain.data.plan import Rows
    from drivetrain.loop.model import PreparedModel
    from drivetrain.loop.optimizer import PreparedOptimizer

logger = logging.getLogger(__name__)

@final
class MicroBatch:
    """Context of one micro-batch. A class, since a generator takes twice as long in each step."""

    __slots__ = ("_loop", "_outer", "_was_open", "_window")

    def __init__(self, loop: TrainingLoop, window: Window) -> None:
        self._loop, self._window = loop, window

    def __enter__(self) -> None:
        loop, window = self._loop, self._window
        window.begin(loop.loop_state(), loop.steps)
        if window.position == 1 and window.length > 1 and loop.watches_edits:
            gradient_edits.watch(window, loop.backend)
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
        num_samples: returns the samples of the data set that the current batch is of; 0 where that is not known.
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
        num_samples: Callable[[], int] = lambda: 0,
    ) -> None:
        self.backend, self.steps = backend, steps
        self._scales_losses = backend.settings.precision.loss_scaling
        self.models: list[PreparedModel] = []
        """In the order of ``prepare``."""
        self.step = 0
        """Optimizer steps so far, skipped ones too."""
        self.loop_state = loop_state if sync_with_dataloader else lambda: _endless(loop_state())
        self.place, self.kept = place, kept
        self.clipped_to = 0.0
        """The norm to which the gradients of the next step were clipped; 0 for none."""
        self.record: Any = None
        """The :class:`drivetrain.run_record.RunRecord` of a run that ``drivetrain compare`` has started."""
        self._on_step, self.count_items, self._sync_each_batch = on_step, count_items, sync_each_batch
        self.checks = LossChecks(backend.topology, num_samples, count_items=count_items)
        self._weights = LossWeights(backend, kept)
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
        self._holds_none: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        """Optimizers that hold none of them, with the numbers of those and of its parameters then."""
        self._searched: set[tuple[type, ...]] = set()
        self._num_backwards = 0
        self._dp_size, self._dp_rank = backend.topology.dp_size, backend.topology.dp_rank
        self.averaged = self._dp_size if backend.capabilities.averages_gradients else 1
        """Number by which the engine divides the sum of gradients; losses are multiplied by it."""
        self._linear_hooks: set[int] = set()
        self._finds_loose = self.watches_edits = self._dp_size > 1 and not backend.capabilities.pipelined
        self._windows: dict[tuple[PreparedModel, ...], Window] = {}
        self.manual = self.window = Window(steps, self._dp_size, self._dp_rank, self.models)
        """For losses outside of ``accumulate``; and the window of the current micro-batch, or else of the last one."""
        self.set_steps(steps)
        self._last_norm: Tensor | None = None
        self._handed: _Handed | None = None
        """The last loss of the closure that runs; ``None`` where none does."""
        self._warned_length = self._warned_inputs = False

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
            raise UsageError(
                f"gradient_accumulation_steps must be at least 1, not {steps}",
                cure="Write 1 to step after every batch.",
            )
        self.steps = self.manual.length = steps

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        num_items: Items | None = None,
        denominator: float | Tensor | None = None,
        *,
        retain_graph: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradients of one micro-batch's loss. See :meth:`drivetrain.Accelerator.backward`."""
        if not self.models:
            self._refuse_alone()
            log_call("backward")
            loss.backward(retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]
            return
        if kwargs:
            loss = _weighted(loss, **kwargs, is_sum=num_items is not None or denominator is not None)
        models, closes = self._models_of_backward()
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
            self._refuse_hooks(models, "items")
        self.check_hooks(models)
        window.backwards += 1
        window.backwards_here += 1
        if window.edits is not None:
            window.edits.before_backward()
        try:
            if retain_graph or self.loose.parameters:
                with self._around_backward(primary, retain_graph):
                    primary.trainable.backward(loss, scale)
            else:
                primary.trainable.backward(loss, scale)
        except RuntimeError as error:
            note_likely_cause(error)
            raise
        if closes:
            self._correct(models)
            self.gradients_reduced()
        if self.watches_edits and self._windows:
            gradient_edits.after_backward(window, self._windows.values(), self.backend)
        self.note_loss(loss, window.rows, num_items)
        for model in self.models:
            model.active = model.active and bool(retain_graph)

    def _models_of_backward(self) -> tuple[Sequence[PreparedModel], bool]:
        """Return the models of the window, and whether the backward that begins reduces their gradients."""
        if self.window.open:
            return self.window.models, self.window.closing
        # Of the models that ran forward, else of all.
        models = self.models if len(self.models) == 1 else [one for one in self.models if one.active] or self.models
        self.window, closes = self.manual, True
        self.manual.weigh_alone(self.loop_state())
        for model in models:
            model.window = self.manual
            closes = closes and not model.held
        return models, closes

    def note_loss(self, loss: Tensor, rows: Rows | None = None, num_items: Items | None = None) -> None:
        """Add a loss to the record of a run, where there is one, after its backward.

        Args:
            loss: of a micro-batch, or, without rows and items, of all ranks.
            rows: of the batch that it is a mean over.
            num_items: what it is a sum over.
        """
        if self.record is not None:
            number = 1 if rows is None else rows.real[self._dp_rank]
            self.record.backward(loss, float(number if num_items is None else num_items), is_sum=num_items is not None)

    def _around_backward(self, model: Any, retain_graph: bool | None) -> ExitStack:
        """Contexts of a backward that keeps its graph, or of a loss that depends on parameters of no prepared model."""
        with ExitStack() as stack:
            if retain_graph:
                stack.enter_context(model.trainable.retaining_graph())
            if self.loose.parameters:
                stack.enter_context(self.loose.backward())
            return stack.pop_all()

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
            self._refuse_hooks(models, "items" if self.window.guesses else "samples")
            for model in models:
                model.trainable.scale_gradients(factor)

    def check_hooks(self, models: Sequence[PreparedModel]) -> None:
        """Refuse hooks of the script that would see gradients multiplied by the loss scale. Not collective.

        Raises:
            UsageError: losses are scaled, and a hook is not linear.
        """
        if self._scales_losses:
            self._refuse_hooks(models, "scale")

    def _refuse_hooks(self, models: Sequence[PreparedModel], cause: Cause) -> None:
        """Refuse hooks of the script for which a multiple of the gradient is not as good as the gradient."""
        # torch numbers all hooks of a process, so that parameters are asked only where one was set.
        now = RemovableHandle.next_id
        for model in models:
            if model.hooks_tried.get(cause) != now:
                refuse_multiples(model.trainable.gradient_hooks(), self._linear_hooks, cause)
                model.hooks_tried[cause] = now

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
            weight = self._weights.of(loss, window, closes=closes, by_items=is_sum or self.count_items)
        if items is None and rows is not None:
            self.checks.refuse_sum(loss, rows, model, window.weight)
        if items is None and self.count_items and (self._dp_size > 1 or window.length > 1):
            items = self._items_of(loss)
            scale = window.scale(items, self._total, closes=closes, weight=weight) * items
        else:
            scale = window.scale(items, self._total, closes=closes, weight=weight)
        if self._handed is not None:
            by_rows = window.weight if weight is None else weight
            self._handed = _Handed(loss, by_rows if items is None else items, is_sum=is_sum)
        self.checks.look_at(loss, model, window.rows, steps=self.steps, by_items=items is not None)
        return scale if self.averaged == 1 else scale * self.averaged

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
        return not self._finds_loose or optimizer in self._holds_none

    def refuse_unprepared(self, optimizer: Optimizer) -> None:
        """Raise where an optimizer is about to step a tensor of nothing prepared that a loss of this loop trained."""
        if optimizer not in self._holds_none:
            # It may step what losses of a known kind reach since a while.
            self._searched.clear()
        looked_at = len(self.unprepared), sum([len(group["params"]) for group in optimizer.param_groups])
        if self._holds_none.get(optimizer) == looked_at:
            return
        parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        own = [
            each
            for each in parameters
            if id(each) in self.unprepared and self.unprepared[id(each)]() is not None and each not in self.loose
        ]
        if not own:
            self._holds_none[optimizer] = looked_at
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
            self._weights.joining = True
            stack.callback(setattr, self._weights, "joining", False)
            for window in self._windows.values():
                window.edits, window.sync_each_batch = None, window.always_reduces
            stack.callback(setattr, self, "watches_edits", self.watches_edits)
            self.watches_edits = False
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
        self._last_norm = self._clip_models(parameters, max_norm, norm_type)
        return self._last_norm

    def _clip_models(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients of prepared models by one norm of all. An engine that steps each by itself measures first."""
        shares = self._by_owner(parameters)
        for owner, _ in shares:
            owner.check_clipped("clip_grad_norm_")
        if len(shares) == 1 or self.backend.capabilities.optimizer_spans_models:
            return shares[0][0].trainable.clip_grad_norm(parameters, max_norm, norm_type)
        # Nothing is clipped by an infinite norm.
        norms = [owner.trainable.clip_grad_norm(share, math.inf, norm_type) for owner, share in shares]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]), norm_type)
        if math.isfinite(max_norm) and not total <= max_norm:
            # As torch's clip_grad_norm_: by 0 where the norm of another model is not finite, whose own step is skipped.
            ratio = max_norm / (total.item() + _EPSILON) if torch.isfinite(total) else 0.0
            for (owner, share), norm in zip(shares, norms, strict=True):
                owner.trainable.clip_grad_norm(share, ratio * (norm.item() + _EPSILON), norm_type)
        return total

    def _clip_loose(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients of which some are of no prepared model, by one norm of all."""
        others = [each for each in parameters if each not in self.loose]
        norm = self._clip_models(others, math.inf, norm_type) if others else None
        self._last_norm = total = self.loose.clipped(parameters, norm, max_norm, norm_type)
        if norm is not None and total > max_norm:
            self._clip_models(others, float(norm * max_norm / (total + _EPSILON)), norm_type)
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
        shares = self._by_owner(parameters)
        for owner, _ in shares:
            owner.check_clipped("clip_grad_value_")
        for owner, share in shares:
            owner.trainable.clip_grad_value(share, clip_value)

    def _by_owner(self, parameters: Sequence[Tensor]) -> list[tuple[PreparedModel, list[Tensor]]]:
        """Models that hold these parameters, in order of ``prepare``, with those that each holds.

        Parameters that an engine has replaced, which it finds by itself, go to the first.
        """
        if len(self.models) == 1:
            return [(self.models[0], list(parameters))]
        left = list(parameters)
        found: list[tuple[PreparedModel, list[Tensor]]] = []
        for model in self.models:
            held = set(map(id, model.trainable.module.parameters()))
            share = [each for each in left if id(each) in held]
            if share:
                found.append((model, share))
                left = [each for each in left if id(each) not in held]
        if found:
            found[0][1].extend(left)
        else:
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
        self.checks.forget()
        if self.kept is not None:
            self.kept.outputs.clear()
        self._holds_none.clear()
        for known in (self._searched, self._linear_hooks):
            known.clear()
        self.manual.reset()
        self.window, self._last_norm, self.clipped_to = self.manual, None, 0.0
        self._num_backwards = 0
        self._warned_length = self._warned_inputs = False


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

_EPSILON = 1e-6
"""Added to a norm that is divided by, as in ``torch.nn.utils.clip_grad_norm_``."""


def _endless(loop: LoopState) -> LoopState:
    """A loop state whose end closes no window."""
    return loop._replace(is_last=False, unknown="")


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
        "create_graph": "Compute the gradient with torch.autograd.grad(loss, inputs, create_graph=True), and call "
        "accelerator.backward with the loss that contains it.",
        "inputs": "Set requires_grad_(False) on the parameters that this loss shall not train, before the forward.",
    }
    raise UnsupportedError(
        f"backward() does not take {', '.join(sorted(names))} with a prepared model",
        cure=" ".join(dict.fromkeys(cures.get(name, cures["create_graph"]) for name in sorted(names))),
    )
