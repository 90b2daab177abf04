"""Prepared optimizers, which step once per accumulation window, and the learning-rate schedulers that follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain.distributed.watchdog import log_call
from drivetrain.errors import UsageError

if TYPE_CHECKING:
    from drivetrain.loop.accumulation import TrainingLoop
    from drivetrain.loop.model import PreparedModel


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
        self._skipped = False
        self.num_applied = 0
        """Updates really applied, as far as it is known."""

    def bind(self, model: PreparedModel, optimizer: Optimizer) -> None:
        """Bind it to the models whose parameters it holds, and to the engine's optimizer."""
        self.optimizer = optimizer
        self.models.append(model)

    def settle(self) -> None:
        """Determine whether the last step was applied, and run what depends on it. Waits for a lazy device."""
        step, self.pending = self.pending, None
        if step is not None:
            self._skipped = step()
            self.num_applied += not self._skipped
            for move in step.waiting:
                move()

    @property
    def applied(self) -> int:
        """Number of updates applied, for schedulers."""
        if self.pending is not None:
            self.settle()
        return self.num_applied

    @property
    def param_groups(self) -> Any:
        """The engine optimizer's own list."""
        if self.pending is not None:
            self.settle()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The engine optimizer's own mapping."""
        if self.pending is not None:
            self.settle()
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
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

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    @property
    def is_ready(self) -> bool:
        """Whether a :meth:`step` now ends a window."""
        return all(model.window.closing for model in self.models)

    @property
    def step_was_skipped(self) -> bool:
        """The last step that was due left the parameters untouched, because gradients were not finite."""
        if self.pending is not None:
            self.settle()
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply one update where a window ends, else wait. Collective where the engine's step is."""
        if not self.models:
            raise UsageError(
                "this optimizer holds no parameters of a prepared model, so nothing tells when it may step",
                cure="Prepare its model too: model, optimizer = accelerator.prepare(model, optimizer).",
            )
        for model in self.models:  # `is_ready`, inlined since it runs at each step
            if not model.window.closing:
                return
        log_call("step")
        if self.pending is not None:
            self.settle()
        for model in self.models:
            model.check_reduced()
        _STEPPING.append(self)
        try:
            result = self.models[0].trainable.optimizer_step(self.optimizer, closure)
        finally:
            _STEPPING.pop()
        if result.pending is None:
            self._skipped = result.skipped
            self.num_applied += not result.skipped
        else:
            self.pending = PendingStep(result.pending)
        self._loop.stepped(self)

    def unscale(self) -> None:
        """Take the loss scale out of the gradients now, where a window ends."""
        if self.models and self.is_ready:
            self.models[0].trainable.unscale_gradients(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, unless they belong to a window that is still open."""
        if not self.models:
            self.optimizer.zero_grad(set_to_none)
        elif self.models[0].window.may_drop_gradients:
            self.models[0].trainable.zero_grad(self.optimizer, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Passed on."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The engine optimizer's own, as this rank holds it."""
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Passed on."""
        self.settle()
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For schedule-free optimizers, which have modes; passed on where the optimizer has one."""
        self._mode("train")

    def eval(self) -> None:
        """As :meth:`train`."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        switch = getattr(self.optimizer, name, None)
        if callable(switch):
            switch()


@final
class PreparedScheduler:
    """A prepared learning-rate scheduler.

    :meth:`step` moves it if at least one update was applied since it last moved: so it waits inside an accumulation
    window and over a skipped step, whether it is called every batch or every epoch.

    Args:
        scheduler: the user's.
        optimizers: the prepared optimizers whose learning rate it sets; empty when none of them was prepared.
        step_with_optimizer: ``False`` moves it at every call.
        moves_per_step: 1; the number of data-parallel processes to repeat Accelerate's way.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        *,
        step_with_optimizer: bool = True,
        moves_per_step: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._follow = step_with_optimizer and bool(self.optimizers)
        self._moves = moves_per_step
        self._seen = self._applied()

    def _applied(self) -> int:
        """Updates applied so far; waits for a lazy device."""
        return sum(optimizer.applied for optimizer in self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, if an update was applied since the last move. Arguments (a metric, an epoch) are passed on."""
        if not self._follow:
            self.scheduler.step(*args, **kwargs)
            return
        applied = 0
        for optimizer in self.optimizers:
            if optimizer.pending is not None:
                # The learning rate is not read yet, so there is no need to wait for the device.
                optimizer.pending.waiting.append(lambda: self.step(*args, **kwargs))
                return
            applied += optimizer.num_applied
        if applied == self._seen:
            return
        self._seen = applied
        self.scheduler.step(*args, **kwargs)
        for _ in range(1, self._moves):
            # A schedule of fixed length raises when it is moved beyond its end, as several moves per step may do.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total - 1:
                self.scheduler.step(*args, **kwargs)

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
        self._applied()
        self.scheduler.load_state_dict(state_dict)
        self._seen = self._applied()

    def __getattr__(self, name: str) -> Any:
        if name in {"scheduler", "optimizers"}:
            raise AttributeError(name)
        self._applied()
        return getattr(self.scheduler, name)


# ---- unprepared optimizers ------------------------------------------------------------------------------------------

_STEPPING: list[PreparedOptimizer] = []
"""Prepared optimizers whose engine steps at this moment."""

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
        for model in loop.models:
            if model.trainable.shares(parameters):
                model.trainable.before_unprepared_step(optimizer)
                model.check_reduced()
