"""Private names of torch's DTensor that sharding engines read and set, checked before one starts."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_DTENSOR = ("_local_tensor", "_op_dispatcher", "_spec")
_DISPATCHER = ("_custom_op_handlers",)


def check_dtensor(user: str) -> None:
    """Raise where the installed torch's DTensor lacks a private attribute. Not collective.

    Args:
        user: the distribution of the engine.

    Raises:
        BackendBlockedError: it does.
    """
    for owner, names in ((DTensor, _DTENSOR), (getattr(DTensor, "_op_dispatcher", None), _DISPATCHER)):
        BackendBlockedError.check_names(owner, names, library="torch", tested=TESTED, user=user)
