"""Describes the reference backend, through the same hook that every plugin uses."""

from __future__ import annotations

from drivetrain.api import BackendInfo, Capabilities, hookimpl

SINGLE = BackendInfo(
    name="single",
    aliases=("no", "none"),
    summary="One process, one device, nothing wrapped: the reference for all others.",
    backend="drivetrain.backends.single:SingleBackend",
    capabilities=Capabilities(multi_process=False, join_uneven_inputs=True, async_save=True),
    preference=100,
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``single``."""
    return [SINGLE]
