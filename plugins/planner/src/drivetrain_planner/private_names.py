"""Private names of torch that traces for an accelerator use, checked before one begins."""

from __future__ import annotations

import torch

from drivetrain.api import BackendBlockedError

TESTED = "2.13.0"
"""The release of torch that ``locks/dev.txt`` holds."""

_DISPATCHER = ("_ExcludeDispatchKeyGuard", "_dispatch_has_kernel_for_dispatch_key")
_OPERATOR = ("_op_dk",)


def check() -> None:
    """Raise where the installed torch lacks a private name.

    Raises:
        BackendBlockedError: it does.
    """
    for owner, names in ((torch._C, _DISPATCHER), (torch.ops.aten.dropout.default, _OPERATOR)):  # noqa: SLF001
        BackendBlockedError.check_names(owner, names, library="torch", tested=TESTED, user="drivetrain-planner")
