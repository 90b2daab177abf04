"""Private attributes of torch's pipeline schedules, checked on each schedule before one is set.

torch's public ``step`` cuts a batch by itself and sends shapes to its neighbours first; here stages know both.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_SINGLE = (
    *("_initialize_stage", "_stage_backward_initialized", "_stage_forward_initialized"),
    *("_n_microbatches", "_step_microbatches"),
)
_SEVERAL = ("_initialize_stages", "_stages_backward_initialized", "_stages_forward_initialized", "_step_microbatches")

_ONE_FLAG = {
    "_stage_forward_initialized": "_stage_initialized",
    "_stage_backward_initialized": "_stage_initialized",
    "_stages_forward_initialized": "_stages_initialized",
    "_stages_backward_initialized": "_stages_initialized",
}
"""The names of older releases of torch, 2.9 among them, which have one flag for both directions."""


def flags(schedule: Any) -> tuple[str, ...]:
    """Names of the flags that mark a schedule's stages as initialized."""
    names = tuple(name for name in _names(schedule) if name.endswith("_initialized"))
    older = tuple(dict.fromkeys(_ONE_FLAG[name] for name in names))
    return older if all(hasattr(schedule, name) for name in older) else names


def _names(schedule: Any) -> tuple[str, ...]:
    return _SINGLE if isinstance(schedule, PipelineScheduleSingle) else _SEVERAL


def check(schedule: Any) -> None:
    """Raise where a schedule of torch lacks an attribute. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    names = (*(name for name in _names(schedule) if not name.endswith("_initialized")), *flags(schedule))
    BackendBlockedError.check_names(schedule, names, library="torch", tested=TESTED, user="drivetrain-megatron")


def run_with_messages() -> Any:
    """Return the class of torch that runs any list of computations and messages. Not collective.

    Raises:
        BackendBlockedError: torch has it no longer, or not the method that puts messages into a list.
    """
    names = {"library": "torch", "tested": TESTED, "user": "drivetrain-megatron"}
    BackendBlockedError.check_names(schedules, ("_PipelineScheduleRuntime",), **names)
    found = schedules._PipelineScheduleRuntime  # noqa: SLF001
    BackendBlockedError.check_names(found, ("_prepare_schedule_with_comms",), **names)
    return found
