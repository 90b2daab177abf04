"""Memory and time models of Drivetrain's backends, and the choice between their layouts.

The names below are the types of a backend's estimates; an entry point of the group ``drivetrain.estimates`` names the
function that returns them, see :func:`drivetrain_planner.choosing.ask`. None imports torch.
"""

from drivetrain_planner.estimates import (
    Bench,
    Estimate,
    EventKind,
    Ledger,
    OptimizerCosts,
    PlanRequest,
    TimeModel,
    Trace,
    TraceEvent,
    Tracing,
    Traffic,
    Variants,
    Work,
    held_whole,
    replay_whole,
    trained_sizes,
)
from drivetrain_planner.naming import called, named

__all__ = [
    "Bench",
    "Estimate",
    "EventKind",
    "Ledger",
    "OptimizerCosts",
    "PlanRequest",
    "TimeModel",
    "Trace",
    "TraceEvent",
    "Tracing",
    "Traffic",
    "Variants",
    "Work",
    "called",
    "held_whole",
    "named",
    "replay_whole",
    "trained_sizes",
]
