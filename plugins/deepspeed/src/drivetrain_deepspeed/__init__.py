"""The backend ``deepspeed`` for Drivetrain: DeepSpeed's ZeRO behind the same loop."""

from drivetrain_deepspeed.accelerate import DeepSpeedPlugin

__all__ = ["DeepSpeedPlugin"]
