"""``DummyOptim`` and ``DummyScheduler``: placeholders for an optimizer and schedule that the engine's file describes.

Scripts of Accelerate that leave optimizer and schedule to an engine's file prepare these two in their place. A backend
that owns its optimizer replaces them with the real ones; other backends raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.optim import Optimizer

from drivetrain.errors import UsageError


@final
class DummyOptim(Optimizer):
    """Holds parameters and hyper-parameters until ``prepare`` puts the engine's own optimizer in its place.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: learning rate; ``None`` leaves it to the engine's configuration, and 0.001 where that says ``auto``.
        weight_decay: the same, with 0.
        kwargs: further hyper-parameters (``betas``, ``eps``) for what the configuration leaves open.
    """

    def __init__(self, params: Any, lr: float | None = None, weight_decay: float | None = None, **kwargs: Any) -> None:
        said = {"lr": lr, "weight_decay": weight_decay, **kwargs}
        self.given = {key: value for key, value in said.items() if value is not None}
        """Hyper-parameters that the script said; all others are open."""
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [dict(group) for group in groups]
        self._given_of_groups = [tuple(group) for group in groups]
        super().__init__(groups, {"lr": 0.001, "weight_decay": 0.0, **self.given})

    def given_groups(self) -> list[dict[str, Any]]:
        """The parameter groups as the script gave them, without the defaults that torch adds."""
        pairs = zip(self.param_groups, self._given_of_groups, strict=False)
        return [{key: group[key] for key in given} for group, given in pairs]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Raise :class:`UsageError`: the real one steps, once this one is prepared together with its model."""
        raise UsageError(
            "DummyOptim stands for an optimizer of the engine and cannot step",
            cure="Prepare it together with its model: model, optimizer = accelerator.prepare(model, optimizer).",
        )


@final
class DummyScheduler:
    """Holds a schedule's length until ``prepare`` puts the engine's own scheduler in its place.

    Args:
        optimizer: the optimizer, a :class:`DummyOptim` or a prepared one.
        total_num_steps: optimizer updates in the whole run. (Moves are counted once per update, not per process.)
        warmup_num_steps: updates until the full learning rate is reached.
        lr_scheduler_callable: ``lr_scheduler_callable(optimizer)`` makes the scheduler where the engine's configuration
            has none.
        kwargs: further parameters for what the configuration leaves open.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def refuse_without_engine(optimizer: Optimizer, backend: str) -> None:
    """Raise :class:`UsageError` for a :class:`DummyOptim` under a backend that has no optimizer of its own."""
    if isinstance(optimizer, DummyOptim):
        raise UsageError(
            f"DummyOptim stands for an optimizer that the engine's own file names, and {backend} has no such file",
            cure="Pass a real one, e.g. torch.optim.AdamW(model.parameters(), lr=...).",
        )


def scheduler_without_engine(scheduler: Any, backend: str) -> Any:
    """The scheduler of a :class:`DummyScheduler` where the engine has none; any other is returned unchanged.

    Raises:
        UsageError: a :class:`DummyScheduler` that has no ``lr_scheduler_callable``.
    """
    if not isinstance(scheduler, DummyScheduler):
        return scheduler
    if scheduler.lr_scheduler_callable is None:
        raise UsageError(
            "DummyScheduler stands for a scheduler that the engine's own file names, and under "
            f"{backend} there is none",
            cure="Pass a real one of torch.optim.lr_scheduler, or DummyScheduler(..., lr_scheduler_callable=...).",
        )
    return scheduler.lr_scheduler_callable(scheduler.optimizer)
