"""Attributes of FSDP's parameter groups that this plugin reads, replaces or sets; torch documents none of them.

Some are read with a default, since they come into being with the first forward: another name would leave gradients
where ``zero_grad`` should drop them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_WHO: dict[str, Any] = {"library": "torch", "tested": TESTED, "user": "drivetrain-fsdp"}

_GROUP = (
    *("_all_gather_result", "_partial_reduce_output", "fsdp_params", "is_sharded", "modules", "post_backward"),
    *("pre_backward", "pre_forward", "reduce_grads", "reshard", "unshard"),
)
_PARAMETER = (
    *("_module_info", "_param_fqn", "init_unsharded_param", "sharded_param", "to_sharded_dtensor"),
    "unsharded_accumulated_grad",
)
_MODULE_INFO = ("module", "param_name", "shared_modules", "shared_param_names")
_GATHERED = ("_unsharded_param",)
"""Attributes of a parameter that was gathered."""

_UNIT = ("_get_fsdp_state",)
_GRAPH_TASK = ("_current_graph_task_id",)
_NO_GRAPH_TASK = -1
_STATE = ("_fsdp_param_groups", "_fsdp_param_group")
"""Attributes of a unit's state: the first, or up to torch 2.12 the second."""


def groups_of(module: Any) -> list[Any]:
    """FSDP's parameter groups of one unit, for which there is no public word.

    Raises:
        BackendBlockedError: the installed torch keeps them elsewhere.
    """
    BackendBlockedError.check_names(module, _UNIT, **_WHO)
    state: Any = module._get_fsdp_state()  # noqa: SLF001
    several, one = _STATE
    if hasattr(state, several):
        return list(getattr(state, several))
    if not hasattr(state, one):
        raise BackendBlockedError.of_renamed(state, f"has neither {several} nor {one}", **_WHO)
    # A module had one group at most.
    group = getattr(state, one)
    return [] if group is None else [group]


def check(modules: Iterable[Any]) -> None:
    """Raise where a group of these units or one of its parameters lacks an attribute. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    for module in modules:
        for group in groups_of(module):
            BackendBlockedError.check_names(group, _GROUP, **_WHO)
            for one in group.fsdp_params:
                BackendBlockedError.check_names(one, _PARAMETER, **_WHO)
                BackendBlockedError.check_names(one._module_info, _MODULE_INFO, **_WHO)  # noqa: SLF001


def check_gathered(one: object) -> None:
    """Raise if a parameter has no gathered one after its first gather. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(one, _GATHERED, **_WHO)


def in_backward() -> bool:
    """Whether autograd computes gradients now, in this thread, for which there is no public word.

    Raises:
        BackendBlockedError: the installed torch does not say.
    """
    BackendBlockedError.check_names(torch._C, _GRAPH_TASK, **_WHO)  # noqa: SLF001
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK  # noqa: SLF001
