"""The backend ``deepspeed`` for Drivetrain: DeepSpeed's ZeRO behind the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_deepspeed.accelerate import DeepSpeedPlugin

__all__ = ["DeepSpeedPlugin"]


def __getattr__(name: str) -> Any:
    """The name scripts import; late, since the command line reads this package in milliseconds."""
    if name != "DeepSpeedPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from drivetrain_deepspeed.accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin
