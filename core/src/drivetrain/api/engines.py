"""Public names for engines that replace what torch does: parameters, hooks, generators, outputs or a forward.

An engine that keeps the module, its parameters and torch's autograd, as the bases of ``drivetrain.api`` do, needs none
of them. Each is imported on first use, since all need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain.backends.local_gradients import is_taken
    from drivetrain.distributed import trees
    from drivetrain.distributed.rank_numbers import numbers_coordinate
    from drivetrain.distributed.rng import DeviceGenerator, register_device_generator
    from drivetrain.distributed.watchdog import check_collective
    from drivetrain.loop.buffers import Buffers
    from drivetrain.loop.gradient_hooks import try_hook
    from drivetrain.loop.model import call_plainly
    from drivetrain.loop.precision import autocast

__getattr__ = on_first_use(
    __name__,
    {
        "drivetrain.backends.local_gradients": ("is_taken",),
        "drivetrain.distributed": ("trees",),
        "drivetrain.distributed.rank_numbers": ("numbers_coordinate",),
        "drivetrain.distributed.rng": ("DeviceGenerator", "register_device_generator"),
        "drivetrain.distributed.watchdog": ("check_collective",),
        "drivetrain.loop.buffers": ("Buffers",),
        "drivetrain.loop.gradient_hooks": ("try_hook",),
        "drivetrain.loop.model": ("call_plainly",),
        "drivetrain.loop.precision": ("autocast",),
    },
)

__all__ = [
    "Buffers",
    "DeviceGenerator",
    "autocast",
    "call_plainly",
    "check_collective",
    "is_taken",
    "numbers_coordinate",
    "register_device_generator",
    "trees",
    "try_hook",
]
