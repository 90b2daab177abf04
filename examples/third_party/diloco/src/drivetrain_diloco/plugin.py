"""Registers the backend and its observer, as data and hooks. Imports neither torch nor the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.api import BackendInfo, Capabilities, hookimpl

if TYPE_CHECKING:
    import click

DILOCO = BackendInfo(
    name="diloco",
    aliases=("local_sgd_outer",),
    summary="DiLoCo: workers train alone for local_steps steps, then an outer Nesterov step joins them.",
    backend="drivetrain_diloco.backend:DiLoCoBackend",
    api=3,
    config="drivetrain_diloco.config:DiLoCoConfig",
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_replicate"}),
        # A loss scale that overflows on one worker and not on another would need a message in every step.
        precisions=frozenset({"no", "bf16"}),
        async_save=True,
    ),
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``diloco``."""
    return [DILOCO]


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """``drivetrain diloco``."""
    from drivetrain_diloco.commands import diloco

    group.add_command(diloco)


@hookimpl
def drivetrain_step_ended(accelerator: Any, step: int) -> None:
    """Log how far the workers had drifted apart, when a round has just ended."""
    if accelerator.distributed_type != DILOCO.name:
        return
    from drivetrain_diloco.observer import log_rounds

    log_rounds(accelerator, step)


@hookimpl
def drivetrain_closed(accelerator: Any) -> None:
    """Tell what the rounds sent, and what reducing every step's gradients would have."""
    if accelerator.distributed_type != DILOCO.name:
        return
    from drivetrain_diloco.observer import tell_traffic

    tell_traffic(accelerator)
