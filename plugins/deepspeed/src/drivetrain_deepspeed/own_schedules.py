"""Steps the file's schedule for a script that prepares no scheduler, once per applied update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch.optim import Optimizer

from drivetrain.api import StepResult
from drivetrain_deepspeed import schedules
from drivetrain_deepspeed.written import Written

STATE = "engine_schedule"
"""Name of the schedules' state in a portable checkpoint."""


@final
class OwnSchedules:
    """Schedules of one model's optimizers. A step costs a comparison where the file names none.

    A schedule is made at its optimizer's first step, when it is certain that the script has prepared none.

    Args:
        written: the section.
    """

    def __init__(self, written: Written) -> None:
        self._written = written
        self._named = schedules.names_one(written)
        self._made: dict[int, tuple[Optimizer, Any]] = {}
        self._of_script: list[Optimizer] = []
        self._loaded: Sequence[Mapping[str, Any]] = ()

    def follow_script(self, optimizers: Sequence[Optimizer]) -> None:
        """The script moves the schedule of these itself."""
        self._of_script += optimizers

    def forget(self, optimizer: Optimizer) -> None:
        """Another optimizer has replaced this one."""
        self._made.pop(id(optimizer), None)

    def step(self, optimizer: Optimizer, apply: Callable[[Optimizer], StepResult]) -> StepResult:
        """Apply one update under the file's schedule, and move that. Collective as ``apply`` is.

        Raises:
            UsageError: the schedule leaves a number to the script that the script does not say.
        """
        if not self._named or any(optimizer is each for each in self._of_script):
            return apply(optimizer)
        if id(optimizer) not in self._made:
            self._made[id(optimizer)] = (optimizer, self._make(optimizer))
        result = apply(optimizer)
        if not result.skipped:
            self._made[id(optimizer)][1].step()
        return result

    def state(self) -> list[dict[str, Any]]:
        """JSON-able state of the schedules made so far, in the order of their first step; empty where there is none."""
        return [dict(scheduler.state_dict()) for _, scheduler in self._made.values()] or list(map(dict, self._loaded))

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over :meth:`state`; the learning rates themselves are in the parameter groups."""
        self._loaded = state
        for (_, scheduler), each in zip(self._made.values(), state, strict=False):
            scheduler.load_state_dict(dict(each))

    def _make(self, optimizer: Optimizer) -> Any:
        rates = [group["lr"] for group in optimizer.param_groups]
        first = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        planned = schedules.plan(self._written, first)
        assert planned is not None
        scheduler = schedules.make(*planned, optimizer)
        if len(self._made) < len(self._loaded):
            # Resumed: the groups hold the rates of the next step, which making a schedule has overwritten.
            scheduler.load_state_dict(dict(self._loaded[len(self._made)]))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return scheduler
