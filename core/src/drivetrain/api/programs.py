"""Public names for plugins beside the training: commands, planners, launchers, trackers, converters.

They read what a run is started with, and checkpoints. Each is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain import checkpoint, pictures
    from drivetrain.config.load import load_config
    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.launch.dry_run import CommandLine
    from drivetrain.launch.plan import LaunchPlan
    from drivetrain.loop.precision import policy_for
    from drivetrain.registry import get_registry, pip_line
    from drivetrain.tracking.jsonl import json_value

__getattr__ = on_first_use(
    __name__,
    {
        "drivetrain": ("checkpoint", "pictures"),
        "drivetrain.config.load": ("load_config",),
        "drivetrain.config.resolved": ("ResolvedConfig",),
        "drivetrain.launch.dry_run": ("CommandLine",),
        "drivetrain.launch.plan": ("LaunchPlan",),
        "drivetrain.loop.precision": ("policy_for",),
        "drivetrain.registry": ("get_registry", "pip_line"),
        "drivetrain.tracking.jsonl": ("json_value",),
    },
)

__all__ = [
    "CommandLine",
    "LaunchPlan",
    "ResolvedConfig",
    "checkpoint",
    "get_registry",
    "json_value",
    "load_config",
    "pictures",
    "pip_line",
    "policy_for",
]
