"""Private names of torch's DTensor, optimizers and ``fully_shard`` that sharding engines read, replace or set."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_WHO: dict[str, Any] = {"library": "torch", "tested": TESTED}

_DTENSOR = ("_local_tensor", "_op_dispatcher", "_spec")
_DISPATCHER = ("_custom_op_handlers",)
_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_UNIT = ("_get_fsdp_state",)
_STATE = ("_fsdp_param_groups", "_fsdp_param_group")
"""Attributes of a unit's state: the first, or up to torch 2.12 the second."""

_GROUP = ("fsdp_params", "is_sharded", "modules", "pre_backward", "pre_forward", "post_forward", "reshard")
_PARAMETER = ("_module_info", "_param_fqn", "init_unsharded_param", "sharded_param", "to_sharded_dtensor")
_MODULE_INFO = ("module", "param_name", "shared_modules", "shared_param_names")
_GATHERED = ("_unsharded_param",)
"""Attributes of a parameter that was gathered."""


def check_private_names(user: str) -> None:
    """Raise where the installed torch's DTensor or optimizers lack a private attribute. Not collective.

    Args:
        user: the distribution of the engine.

    Raises:
        BackendBlockedError: it does.
    """
    wanted = (
        (DTensor, _DTENSOR),
        (getattr(DTensor, "_op_dispatcher", None), _DISPATCHER),
        (torch.optim.SGD([torch.empty(0)]), _OPTIMIZER),
        (optimizer, _OF_ALL_OPTIMIZERS),
    )
    for owner, names in wanted:
        BackendBlockedError.check_names(owner, names, user=user, **_WHO)


def groups_of(module: Any, user: str) -> list[Any]:
    """Return the parameter groups of a unit of ``fully_shard``, for which there is no public word. Not collective.

    Args:
        module: the unit.
        user: the distribution of the engine.

    Raises:
        BackendBlockedError: the installed torch keeps them elsewhere.
    """
    BackendBlockedError.check_names(module, _UNIT, user=user, **_WHO)
    state: Any = module._get_fsdp_state()  # noqa: SLF001
    several, one = _STATE
    if hasattr(state, several):
        return list(getattr(state, several))
    if not hasattr(state, one):
        raise BackendBlockedError.of_renamed(state, f"has neither {several} nor {one}", user=user, **_WHO)
    # A module had one group at most.
    group = getattr(state, one)
    return [] if group is None else [group]


def check_group(group: Any, user: str) -> None:
    """Raise where a group or one of its parameters lacks an attribute. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(group, _GROUP, user=user, **_WHO)
    for one in group.fsdp_params:
        BackendBlockedError.check_names(one, _PARAMETER, user=user, **_WHO)
        BackendBlockedError.check_names(one._module_info, _MODULE_INFO, user=user, **_WHO)  # noqa: SLF001


def check_gathered(one: object, user: str) -> None:
    """Raise if a parameter has no gathered one after its first gather. Not collective.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(one, _GATHERED, user=user, **_WHO)
