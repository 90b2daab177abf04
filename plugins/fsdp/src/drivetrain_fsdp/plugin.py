"""Describes the backend ``fsdp``. Imports neither torch nor the backend."""

from __future__ import annotations

from drivetrain.api import BackendInfo, Capabilities, hookimpl

FSDP = BackendInfo(
    name="fsdp",
    aliases=("fsdp2", "fully_sharded_data_parallel"),
    summary="torch FSDP2 (fully_shard): parameters, gradients and optimizer state in shards, gathered unit by unit.",
    names={"FullyShardedDataParallelPlugin": "drivetrain_fsdp.accelerate:FullyShardedDataParallelPlugin"},
    imports={"fsdp_config": "drivetrain_fsdp.accelerate:RULES"},
    backend="drivetrain_fsdp.backend:FSDPBackend",
    config="drivetrain_fsdp.config:FSDPConfig",
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_replicate", "dp_shard"}),
        replicated=False,
        sharded_save=True,
        async_save=True,
    ),
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``fsdp``."""
    return [FSDP]
