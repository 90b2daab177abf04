"""Prepared optimizers, which step once per accumulation window, and the learning-rate schedulers that follow them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain.distributed.call_monitor import Current
from drivetrain.distributed.watchdog import check_collective, log_call, note_likely_cause, place_of
from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.loop.accumulation import TrainingLoop
    from drivetrain.loop.model import PreparedModel

logger = logging.getLogger(__name__)

_NOT_COMPARED = frozenset({"lr", "capturable", "differentiable", "foreach", "fused"})
"""Settings of groups that ranks may have of their own: how a step is computed, and rates, which are compared anyhow."""

_STATE_WRITTEN = "write to an optimizer's state"

_OF_PREPARED = frozenset(
    {
        *("source", "optimizer", "models", "pending", "given", "skipped", "num_applied", "held", "come_back"),
        *("_loop", "_recorded", "_era", "_state_read"),
    }
)
"""Attributes of a prepared optimizer; any other is the user's optimizer's."""

_OF_PREPARED_SCHEDULER = frozenset(
    {"scheduler", "optimizers", "_backend", "_step_with_optimizer", "_moves", "_seen", "_averaged"}
)
"""Attributes of a prepared scheduler; any other is the user's scheduler's."""


@final
class PendingStep:
    """A step of an asynchronous device, which has not yet reported whether the step was skipped.

    Args:
        pending: see :class:`~drivetrain.api.StepResult`.
    """

    def __init__(self, pending: Callable[[], bool]) -> None:
        self._pending: Callable[[], bool] | None = pending
        self._skipped = False
        self.waiting: list[Callable[[], None]] = []
        """Called once the answer is there: what the script did to schedulers in the meantime."""

    def __call__(self) -> bool:
        """Whether the step was skipped; the first call waits for the device."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._skipped = pending()
        return self._skipped


@final
class PreparedOptimizer(Optimizer):
    """A prepared optimizer. It is a ``torch.optim.Optimizer`` for schedulers and type checks, and holds nothing itself.

    Inside ``with accelerator.accumulate(model)`` :meth:`step` and :meth:`zero_grad` act only where a window ends.

    Args:
        source: the user's optimizer.
        loop: counts each step.
    """

    def __init__(self, source: Optimizer, loop: TrainingLoop) -> None:
        # Not super().__init__(): that would register parameter groups of its own.
        self.source = self.optimizer = source
        """The user's optimizer, and what really steps (the engine's; the same object in most)."""
        self.models: list[PreparedModel] = []
        """The models whose parameters it holds."""
        self.pending: PendingStep | None = None
        """The last step while it is not known whether it was applied."""
        self._loop = loop
        self.given: list[Tensor] = [each for group in source.param_groups for each in group["params"]]
        """Parameters that it was made of and that no prepared model is known to hold."""
        self.skipped = False
        """The last step left the parameters untouched, as far as it is known."""
        self.num_applied = 0
        """Updates really applied, as far as it is known."""
        self.held: list[tuple[PreparedModel, frozenset[str]]] = []
        """Names of its parameters in each of these models."""
        self._recorded, self._era = 0, 0
        """Number of its steps that were compared, and the era of the monitor in which they were."""
        self._state_read: tuple[str, int] | None = None
        """The script's line that first had the state since the last step, and a digest of that state then."""
        self.come_back: Callable[[], None] | None = None
        """Set where an optimizer that was prepared later holds parameters of it: called before it steps again."""

    def bind(self, model: PreparedModel, optimizer: Optimizer, held: frozenset[str]) -> None:
        """Bind it to a model of which it holds the parameters of these names, and to the engine's optimizer."""
        self.optimizer = optimizer
        self.models.append(model)
        self.held.append((model, held))

    def settle(self) -> None:
        """Determine whether the last step was applied, and run what depends on it. Waits for a lazy device."""
        step, self.pending = self.pending, None
        if step is not None:
            self.skipped = step()
            self.num_applied += not self.skipped
            for move in step.waiting:
                move()

    @property
    def param_groups(self) -> Any:
        """The engine optimizer's own list."""
        self.settle()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The engine optimizer's own mapping. What a script writes to it must be the same on every rank."""
        self.settle()
        self._watch_state()
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._watch_state()
        self.optimizer.state = value

    @property
    def defaults(self) -> Any:
        """The engine optimizer's own mapping."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.optimizer.defaults = value

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that only the user's optimizer has is written there, where its ``step`` reads it."""
        if name in _OF_PREPARED or hasattr(PreparedOptimizer, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.source if hasattr(self.source, name) else self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    @property
    def is_ready(self) -> bool:
        """Whether a :meth:`step` now ends a window."""
        return all(model.window.closing for model in self.models) if self.models else self._loop.window.closing

    @property
    def in_window(self) -> bool:
        """Whether the script is inside ``with accelerator.accumulate(model)``."""
        return any(model.window.open for model in self.models)

    @property
    def step_was_skipped(self) -> bool:
        """The last step that was due left the parameters untouched, because gradients were not finite."""
        self.settle()
        return self.skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one update where a window ends, else wait; returns the closure's first loss, as torch's optimizers do.

        Collective where the engine's step is.
        """
        if not self.models:
            return self._step_alone(closure)
        for model in self.models:  # `is_ready`, inlined since it runs at each step
            if not model.window.closing:
                return None
        site = log_call("step")
        if self.come_back is not None:
            self.come_back()
        self._record(site)
        if self.pending is not None:
            self.settle()
        for model in self.models:
            model.check_reduced()
        loop = self._loop
        if loop.loose.parameters:
            loop.loose.refuse_pipelined(self)
            loop.loose.check_reduced(self, loop.models)
        if loop.unprepared:
            loop.refuse_unprepared(self.optimizer)
        losses: list[Any] = []

        def kept() -> Any:
            assert closure is not None
            found, of_all = loop.run_closure(closure)
            losses.append(found)
            return of_all

        _STEPPING.append(self)
        try:
            result = self.models[0].trainable.optimizer_step(self.optimizer, closure and kept)
        except RuntimeError as error:
            note_likely_cause(error)
            raise
        finally:
            _STEPPING.pop()
        if result.pending is None:
            own = vars(self)  # past `__setattr__`, since it runs at each step
            own["skipped"] = result.skipped
            own["num_applied"] += not result.skipped
        else:
            self.pending = PendingStep(result.pending)
        self._loop.stepped(self)
        return losses[0] if losses else None

    def _watch_state(self) -> None:
        """Before the next step, find out whether the script has written to the state, which all ranks must do.

        Not in a pipeline, of which a stage may have no state that a script could write to.
        """
        if Current.monitor is None or self._state_read is not None or not self.models:
            return
        if not self._loop.backend.capabilities.pipelined:
            vars(self)["_state_read"] = place_of(_STATE_WRITTEN, 3), _digest(self.optimizer.state)

    def forget_writes(self) -> None:
        """Do not compare what was written to the state up to now: it was loaded, on every rank."""
        vars(self)["_state_read"] = None

    def _record(self, site: str) -> None:
        """Record a step for the comparison of ranks: learning rates always, other group settings at every 16th.

        At every 64th also the trained parameters, except in a pipeline, whose ranks hold different ones. For
        ``drivetrain compare``, the weights.
        """
        loop, monitor = self._loop, Current.monitor
        if loop.record is not None:
            loop.record.step_begins()
        if monitor is None:
            return
        norm, loop.clipped_to = loop.clipped_to, 0.0
        read, vars(self)["_state_read"] = self._state_read, None
        if monitor.suspended or self.models[0].steps_alone:
            return
        if read is not None and _digest(self.optimizer.state) != read[1]:
            monitor.record(_STATE_WRITTEN, read[0])
        groups = self.optimizer.param_groups
        if self._era != monitor.era:
            self._era, self._recorded = monitor.era, 0
        vars(self)["_recorded"] = number = self._recorded + 1
        settings: Any = ()
        if number % 16 < 2:
            # The first two steps are among them. What the optimizer does not declare may be the script's own.
            names = sorted(name for name in getattr(self.source, "defaults", ()) if name not in _NOT_COMPARED)
            settings = tuple([tuple([group.get(name) for name in names]) for group in groups])
        trained: Any = ()
        if number % 64 < 2 and not loop.backend.capabilities.pipelined:
            flags = [parameter.requires_grad for group in groups for parameter in group["params"]]
            trained = sum(flags), len(flags), hash(tuple(flags))
        rates = tuple([group.get("lr") for group in (groups if settings else groups[:8])])
        monitor.record("step", site, None, (loop.optimizers.index(self), norm, rates, settings, trained))

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer of only loose parameters, without an engine."""
        loose = self._loop.loose
        if not loose.steps_alone(self):
            raise UsageError(
                f"this {type(self.source).__name__} holds no parameter of a prepared model, and was stepped",
                cure="Prepare it together with its model: model, optimizer = accelerator.prepare(model, optimizer).",
            )
        if not self._loop.window.closing:
            return None
        log_call("step")
        loose.refuse_pipelined(self)
        loose.check_reduced(self, self._loop.models)
        self.skipped = loose.not_finite(self)
        result = None
        if not self.skipped:
            _STEPPING.append(self)
            try:
                result = self.optimizer.step(closure)
            finally:
                _STEPPING.pop()
            self.num_applied += 1
        self._loop.stepped(self)
        return result

    def unscale(self) -> None:
        """Take the loss scale out of the gradients now, where a window ends."""
        if self.models and self.is_ready:
            self.models[0].trainable.unscale_gradients(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, unless they belong to a window that is still open."""
        if not self.models:
            if not self._loop.loose.steps_alone(self) or self._loop.window.may_drop_gradients:
                self.optimizer.zero_grad(set_to_none)
        elif (window := self.models[0].window).may_drop_gradients:
            self.models[0].trainable.zero_grad(self.optimizer, set_to_none)
            if window.items is not None:
                window.forget_items([self.optimizer])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Passed on. Collective over all ranks where it holds parameters of no prepared model."""
        self.optimizer.add_param_group(param_group)
        given = param_group["params"]
        self.given += [given] if isinstance(given, Tensor) else given
        self._loop.find_loose()

    def state_dict(self) -> dict[str, Any]:
        """The engine optimizer's own, as this rank holds it."""
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Passed on."""
        self.settle()
        self._watch_state()
        self.optimizer.load_state_dict(state_dict)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """A copy, or what is read from a pickle, is the engine optimizer's: it belongs to no run."""
        self.settle()
        return _same, (self.optimizer,)

    def train(self) -> None:
        """Call ``train`` of a schedule-free optimizer; do nothing for others."""
        getattr(self.optimizer, "train", _nothing)()

    def eval(self) -> None:
        """Call ``eval`` of a schedule-free optimizer; do nothing for others."""
        getattr(self.optimizer, "eval", _nothing)()


def _digest(state: Mapping[Any, Any]) -> int:
    """Return a number that changes when tensors in an optimizer's state are written or replaced. Reads no values."""
    found: list[Any] = []
    for values in list(state.values()):
        for value in values.values() if isinstance(values, dict) else [values]:
            known = id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0  # noqa: SLF001
            found.append(value if isinstance(value, (int, float)) else known)
    return hash(tuple(found))


def _nothing() -> None:
    """Replaces the modes of an optimizer that has none."""


@final
class PreparedScheduler:
    """A prepared learning-rate scheduler.

    :meth:`step` moves it at each call, as torch does, with two exceptions: a call inside an open accumulation window,
    and calls that follow a skipped step, do nothing. Calls before training, before the optimizer's step, or several
    times after one all move it.

    Args:
        scheduler: the user's.
        optimizers: the prepared optimizers whose learning rate it sets; empty when none of them was prepared.
        backend: over whose data-parallel ranks a metric is averaged.
        step_with_optimizer: ``False`` moves it at every call.
        moves_per_step: 1; the number of data-parallel processes to repeat Accelerate's way.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        backend: Backend,
        *,
        step_with_optimizer: bool = True,
        moves_per_step: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._backend = backend
        self._step_with_optimizer = step_with_optimizer
        self._moves = moves_per_step
        self._seen = self._applied()
        self._averaged = False

    def follow(self, optimizer: PreparedOptimizer) -> None:
        """Follow an optimizer that was prepared after the scheduler."""
        self.optimizers.append(optimizer)
        self._seen = self._applied()

    def _applied(self) -> int:
        """Updates applied so far; waits for a lazy device."""
        for optimizer in self.optimizers:
            optimizer.settle()
        return sum(optimizer.num_applied for optimizer in self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, unless a window is open or the last optimizer step was skipped. Arguments are passed on.

        Collective over the data-parallel ranks where it is given a metric: one that differs between them is averaged.
        """
        if args or kwargs:
            args = tuple([self._same_on_all_ranks(value) for value in args])
            kwargs = {name: self._same_on_all_ranks(value) for name, value in kwargs.items()}
        if not (self._step_with_optimizer and self.optimizers):
            self.scheduler.step(*args, **kwargs)
        else:
            self._follow_steps(args, kwargs, is_open=not all(optimizer.is_ready for optimizer in self.optimizers))

    def _same_on_all_ranks(self, value: Any) -> Any:
        """Average a metric over the data-parallel ranks. Epochs are not metrics, and cost no communication."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            is_metric = value is not None
        else:
            is_metric = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        if not is_metric or self._backend.topology.dp_size == 1:
            return value
        check_collective("scheduler.step", data_parallel=True)
        mine = torch.tensor([float(value)], dtype=torch.float64)
        # As integers: some accelerators have no float64, and metrics that are equal must stay so to the last bit.
        bits = mine.view(torch.int64).to(self._backend.topology.device)
        every = self._backend.gather(bits).cpu()
        if bool((every == every[0]).all()):
            return value
        metrics = every.view(torch.float64)
        if not self._averaged:
            self._averaged = True
            if self._backend.topology.rank == 0:
                logger.warning(
                    "%s.step() was given another metric on each rank (%s). It moves by their mean on every rank. Where "
                    "that is not the metric of all samples, reduce it first, e.g. accelerator.reduce(loss, 'mean') or "
                    "accelerator.gather_for_metrics(losses).mean().",
                    type(self.scheduler).__name__,
                    ", ".join(f"{metric:.6g}" for metric in metrics.tolist()),
                )
        return metrics.mean().item()

    def _follow_steps(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_open: bool) -> None:
        """Move according to :meth:`step`; ``is_open``: it was called inside a window."""
        applied, skipped = 0, False
        for optimizer in self.optimizers:
            if optimizer.pending is not None:
                # The learning rate is not read yet, so there is no need to wait for the device.
                optimizer.pending.waiting.append(lambda: self._follow_steps(args, kwargs, is_open=is_open))
                return
            applied += optimizer.num_applied
            skipped |= optimizer.skipped
        if applied > self._seen:
            self._seen = applied
        elif is_open or skipped:
            return
        elif any(optimizer.in_window for optimizer in self.optimizers):
            # A loop that moves its scheduler first: the update that ends this window has been counted.
            self._seen = applied + 1
        self.scheduler.step(*args, **kwargs)
        for _ in range(1, self._moves):
            # A schedule of fixed length raises when it is moved beyond its end, as several moves per step may do.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total - 1:
                self.scheduler.step(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """A copy, or what is read from a pickle, is the user's scheduler's: it belongs to no run."""
        self._applied()
        return _same, (self.scheduler,)

    def get_last_lr(self) -> list[float]:
        """Learning rates of the last move, one per parameter group."""
        self._applied()
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The user's scheduler's own."""
        self._applied()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Passed on; the next applied update moves it."""
        self._seen = self._applied()
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PREPARED_SCHEDULER:
            raise AttributeError(name)
        self._applied()
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write what the script sets, ``last_epoch`` or ``base_lrs``, to its scheduler, which reads it."""
        if name in _OF_PREPARED_SCHEDULER or name in PreparedScheduler.__dict__:
            object.__setattr__(self, name, value)
        else:
            self._applied()
            setattr(self.scheduler, name, value)


def _same(what: Any) -> Any:
    return what


# ---- unprepared optimizers ------------------------------------------------------------------------------------------

_STEPPING: list[PreparedOptimizer] = []
"""Prepared optimizers whose engine is stepping."""

_loops: WeakSet[TrainingLoop] = WeakSet()


def watch_unprepared_steps(loop: TrainingLoop) -> None:
    """Check every step of an unprepared optimizer that holds parameters of this loop's models.

    torch calls the check for all optimizers of the process, before their step.
    """
    _register_check()
    _loops.add(loop)


@cache
def _register_check() -> None:
    """Register the hook once in a process: it stays when a run ends, so a further run must not add another."""
    register_optimizer_step_pre_hook(before_step)


def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Check a step before it runs; gradients and parameters are only read."""
    if _STEPPING:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for loop in list(_loops):
        if loop.unprepared or not loop.knows(optimizer):
            loop.refuse_unprepared(optimizer)
        for model in loop.models:
            if model.trainable.shares(parameters):
                model.trainable.before_unprepared_step(optimizer)
                model.check_reduced()


# An engine that lets an optimizer step on other tensors than the model's asks whether a hook would see the difference.
before_step.only_reads = True  # type: ignore[attr-defined]
