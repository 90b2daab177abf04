"""What ``prepare(scheduler)`` returns: a scheduler that moves once per applied optimizer update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from drivetrain.loop.optimizer import PreparedOptimizer


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
        """Updates applied so far; waits for a lazy device, and what waited for it happens."""
        applied = 0
        for optimizer in self.optimizers:
            applied += optimizer.applied
        return applied

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, if an update was applied since the last move. Arguments (a metric, an epoch) are passed on."""
        if not self._follow:
            self.scheduler.step(*args, **kwargs)
            return
        for optimizer in self.optimizers:
            if (verdict := optimizer.unsettled) is not None:
                # Nobody looks at the learning rate yet, so nobody has to wait for the device.
                verdict.waiting.append(lambda: self.step(*args, **kwargs))
                return
        applied = self._applied()
        if applied == self._seen:
            return
        self._seen = applied
        self.scheduler.step(*args, **kwargs)
        for _ in range(1, self._moves):
            # A schedule of fixed length raises when it is moved beyond its end, which several moves a step can do.
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
