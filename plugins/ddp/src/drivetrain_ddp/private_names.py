"""Looks up undocumented names of torch's DistributedDataParallel, when they are needed.

Importing the backend checks nothing: another package may have replaced torch's class, and a run of one process needs
none.
"""

from __future__ import annotations

import inspect
from typing import Any

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_WRAPPER = ("_accum_grad_hooks", "_check_reducer_finalized", "_inside_ddp_forward")
_ARGUMENTS = ("forward_sync_buffers", "broadcast_buffers")
"""Arguments of the constructor; up to torch 2.12 the second only."""

_WHO: dict[str, Any] = {"library": "torch", "tested": TESTED, "user": "drivetrain-ddp"}


def without_buffers(kind: type) -> dict[str, bool]:
    """Return the argument that disables DistributedDataParallel's buffer broadcasts in forward.

    Raises:
        BackendBlockedError: the class takes none of the known ones.
    """
    found = inspect.signature(kind).parameters
    for name in _ARGUMENTS:
        if name in found:
            return {name: False}
    raise BackendBlockedError.of_renamed(kind, f"takes neither {' nor '.join(_ARGUMENTS)}", **_WHO)


def check(wrapper: object) -> None:
    """Raise where a DistributedDataParallel lacks a private attribute that the reducer uses.

    Raises:
        BackendBlockedError: it does.
    """
    BackendBlockedError.check_names(wrapper, _WRAPPER, **_WHO)
