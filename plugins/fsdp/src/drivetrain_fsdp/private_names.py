"""Private names of FSDP's parameter groups, beside those that ``drivetrain_sharding`` checks, and of autograd.

Some are read with a default, since they come into being with the first forward (``_unsharded_param``): another name
would leave gradients where ``zero_grad`` should drop them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_WHO: dict[str, Any] = {"library": "torch", "tested": TESTED, "user": "drivetrain-fsdp"}

_GROUP = ("_all_gather_result", "_partial_reduce_output", "post_backward", "reduce_grads", "unshard")
_PARAMETER = ("_param_fqn", "_sharding_spec", "unsharded_accumulated_grad")
_GRAPH_TASK = ("_current_graph_task_id",)
_NO_GRAPH_TASK = -1


def check(groups: Iterable[Any]) -> None:
    """Raise where a group or one of its parameters lacks an attribute. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    for group in groups:
        BackendBlockedError.check_names(group, _GROUP, **_WHO)
        for one in group.fsdp_params:
            BackendBlockedError.check_names(one, _PARAMETER, **_WHO)


def in_backward() -> bool:
    """Whether autograd computes gradients now, in this thread, for which there is no public word.

    Raises:
        BackendBlockedError: the installed torch does not say.
    """
    BackendBlockedError.check_names(torch._C, _GRAPH_TASK, **_WHO)  # noqa: SLF001
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK  # noqa: SLF001
