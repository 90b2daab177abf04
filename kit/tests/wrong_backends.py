"""All wrong backends, and how a process comes to know them. The kit must catch every one."""

from __future__ import annotations

import wrong_side_effects  # noqa: F401
import wrong_state  # noqa: F401 - a module of mistakes registers them by being imported
import wrong_training  # noqa: F401
from toy_backend import Plugin
from wrong_base import MISTAKES

from drivetrain.api import BackendInfo
from drivetrain.registry import get_registry

__all__ = ["MISTAKES", "register"]


def register() -> None:
    """Make all of them known to this process."""
    registry = get_registry()
    if "averagestwice" in registry.names():
        return
    infos = [
        BackendInfo(
            name=name,
            summary=kind.__doc__ or "",
            backend=f"{kind.__module__}:{kind.__name__}",
            capabilities=kind.capabilities,
        )
        for name, kind in MISTAKES.items()
    ]
    registry.register(Plugin(*infos), name="wrong")
