"""Private attributes of torch's pipeline schedules, checked on each schedule before one is set.

torch's public ``step`` cuts a batch by itself and sends shapes to its neighbours first; here stages know both.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_SINGLE = ("_initialize_stage", "_stage_backward_initialized", "_stage_forward_initialized", "_step_microbatches")
_SEVERAL = ("_initialize_stages", "_stages_backward_initialized", "_stages_forward_initialized", "_step_microbatches")


def check(schedule: Any) -> None:
    """Raise where a schedule of torch lacks an attribute. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    names = _SINGLE if isinstance(schedule, PipelineScheduleSingle) else _SEVERAL
    BackendBlockedError.check_names(schedule, names, library="torch", tested=TESTED, user="drivetrain-megatron")
