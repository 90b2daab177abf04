"""Registers the planner's commands and hooks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.api import hookimpl

if TYPE_CHECKING:
    import click

    from drivetrain.api.programs import LaunchPlan, ResolvedConfig


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """``drivetrain plan choose``, ``memory`` and ``measure``."""
    from drivetrain_planner.commands import plan

    group.add_command(plan)


@hookimpl
def drivetrain_choose(resolved: ResolvedConfig) -> Mapping[str, Any] | None:
    """Return the configuration that ``distributed_type: auto`` stands for."""
    from drivetrain_planner.auto import chosen

    return chosen(resolved)


@hookimpl
def drivetrain_predict(resolved: ResolvedConfig, plan: LaunchPlan) -> Mapping[str, Any] | None:
    """Predict what the layout of a configuration holds."""
    from drivetrain_planner.described import prediction

    return prediction(resolved, plan)


@hookimpl
def drivetrain_check_plan(accelerator: Any, predicted: Mapping[str, Any]) -> Any | None:
    """Compares a run with its prediction."""
    from drivetrain_planner.checking import PlanCheck

    return PlanCheck(accelerator, predicted)


@hookimpl
def drivetrain_out_of_memory(resolved: ResolvedConfig, plan: LaunchPlan) -> str | None:
    """Return the layouts that hold less."""
    from drivetrain_planner.described import advice

    return advice(resolved, plan)
