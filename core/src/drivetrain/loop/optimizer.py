"""What ``prepare(optimizer)`` returns: an optimizer that steps once per accumulation window, by its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain.distributed.watchdog import log_call
from drivetrain.errors import UsageError
from drivetrain.loop.model import Record

if TYPE_CHECKING:
    from drivetrain.loop.training import Trainer


@final
class Verdict:
    """Whether one step was skipped, on a device that runs behind the host; what waits for the answer.

    Args:
        pending: see :class:`~drivetrain.api.StepResult`.
    """

    def __init__(self, pending: Callable[[], bool]) -> None:
        self._pending: Callable[[], bool] | None = pending
        self._skipped = False
        self.waiting: list[Callable[[], None]] = []
        """Called once the answer is there: what the script did to schedulers in the meantime."""

    def __call__(self) -> bool:
        """The answer; the first call waits for the device."""
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
        trainer: told of each step.
    """

    def __init__(self, source: Optimizer, trainer: Trainer) -> None:
        # Not super().__init__(): that would register parameter groups of its own.
        self.source = self.optimizer = source
        """The user's optimizer, and what really steps (the engine's; the same object in most)."""
        self._records: list[Record] = []
        self._trainer = trainer
        self._skipped = False
        self._applied = 0
        self._open: Verdict | None = None
        """The last step's, while nobody has asked for it."""

    def bind(self, record: Record, optimizer: Optimizer) -> None:
        """Tell which model's parameters it holds, and what steps them."""
        self.optimizer = optimizer
        self._records.append(record)

    @property
    def records(self) -> Sequence[Record]:
        """The models whose parameters it holds."""
        return self._records

    @property
    def unsettled(self) -> Verdict | None:
        """The last step's verdict while it is not known whether that step was applied; ``None`` when it is."""
        return self._open

    def settle(self) -> None:
        """Learn whether the last step was applied; then what waited for it happens. Waits for a lazy device."""
        verdict, self._open = self._open, None
        if verdict is not None:
            self._skipped = verdict()
            self._applied += not self._skipped
            for move in verdict.waiting:
                move()

    @property
    def applied(self) -> int:
        """Number of updates really applied, for schedulers."""
        if self._open is not None:
            self.settle()
        return self._applied

    @property
    def param_groups(self) -> Any:
        """The engine optimizer's own list."""
        if self._open is not None:
            self.settle()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The engine optimizer's own mapping."""
        if self._open is not None:
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
        # A loop, since a generator costs more than the rest of a step that waits.
        for record in self._records:  # noqa: SIM110
            if not record.ready:
                return False
        return True

    @property
    def step_was_skipped(self) -> bool:
        """The last step that was due left the parameters untouched, because gradients were not finite."""
        if self._open is not None:
            self.settle()
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply one update where a window ends, else wait. Collective where the engine's step is."""
        if not self._records:
            raise UsageError(
                "this optimizer holds no parameters of a prepared model, so nothing tells when it may step",
                cure="Prepare its model too: model, optimizer = accelerator.prepare(model, optimizer).",
            )
        for record in self._records:  # `is_ready`, without the cost of asking it at each step
            if not record.ready:
                return
        log_call("step")
        if self._open is not None:
            self.settle()
        for record in self._records:
            _check_reduced(record)
        _STEPPING.append(self)
        try:
            result = self._records[0].trainable.optimizer_step(self.optimizer, closure)
        finally:
            _STEPPING.pop()
        if result.pending is None:
            self._skipped = result.skipped
            self._applied += not result.skipped
        else:
            self._open = Verdict(result.pending)
        self._trainer.stepped(self._records, self)

    def unscale(self) -> None:
        """Take the loss scale out of the gradients now, where a window ends."""
        if self._records and self.is_ready:
            self._records[0].trainable.unscale_gradients(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, unless they belong to a window that is still open."""
        if not self._records:
            self.optimizer.zero_grad(set_to_none)
        elif self._trainer.may_drop_gradients(self._records):
            self._records[0].trainable.zero_grad(self.optimizer, set_to_none)

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


# ---- steps that the script takes by itself --------------------------------------------------------------------------

_STEPPING: list[PreparedOptimizer] = []
"""Prepared optimizers whose engine steps at this moment."""

_trainers: WeakSet[Trainer] = WeakSet()


def watch_unprepared_steps(trainer: Trainer) -> None:
    """Check every step of an optimizer that is not a prepared one, if it holds parameters of this trainer's models.

    torch calls the check for all optimizers of the process, before their step.
    """
    _register_check()
    _trainers.add(trainer)


@cache
def _register_check() -> None:
    """Once in a process. The hook stays when a run ends, so a further run must not add another."""
    register_optimizer_step_pre_hook(before_step)


def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """The check. It reads gradients and parameters, and changes none."""
    if _STEPPING:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for trainer in list(_trainers):
        for record in trainer.records:
            if record.trainable.shares(parameters):
                record.trainable.before_unprepared_step(optimizer)
                _check_reduced(record)


def _check_reduced(record: Record) -> None:
    """Refuse a step with gradients that differ from rank to rank, unless the script keeps them so."""
    if not (record.held or record.steps_alone) and record.trainable.has_unreduced_gradients():
        name = record.plain_class.__name__
        raise UsageError(
            f"an optimizer of {name} would step with gradients of this rank alone: they came from loss.backward(), "
            "from a backward inside no_sync, or from a micro-batch of a window that is still open",
            cure="Call accelerator.backward(loss), and step where a window ends: prepare the optimizer with its model.",
        )
