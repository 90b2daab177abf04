"""Private names of torch's DTensor and optimizers that sharding engines read and set, checked before one starts."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_DTENSOR = ("_local_tensor", "_op_dispatcher", "_spec")
_DISPATCHER = ("_custom_op_handlers",)
_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


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
        BackendBlockedError.check_names(owner, names, library="torch", tested=TESTED, user=user)
