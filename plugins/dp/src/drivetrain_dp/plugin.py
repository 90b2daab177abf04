"""Describes the backend ``dp``. Imports neither torch nor the backend."""

from __future__ import annotations

from drivetrain.api import BackendInfo, Capabilities, hookimpl

DP = BackendInfo(
    name="dp",
    aliases=("data_parallel",),
    summary="torch DataParallel: one process that splits each batch over the devices of this machine.",
    backend="drivetrain_dp.backend:DPBackend",
    config="drivetrain_dp.config:DPConfig",
    capabilities=Capabilities(multi_process=False, join_uneven_inputs=True, async_save=True),
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``dp``."""
    return [DP]
