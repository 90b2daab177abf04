"""Describes the backend ``ddp``. Imports neither torch nor the backend."""

from __future__ import annotations

from drivetrain.api import BackendInfo, Capabilities, hookimpl

DDP = BackendInfo(
    name="ddp",
    aliases=(
        # What Accelerate calls it, by device.
        *(f"multi_{device}" for device in ("gpu", "cpu", "xpu", "npu", "hpu", "mlu", "sdaa", "musa", "neuron")),
        "distributed_data_parallel",
    ),
    summary="torch DistributedDataParallel: a whole replica in every process, gradients averaged while backward runs.",
    backend="drivetrain_ddp.backend:DDPBackend",
    config="drivetrain_ddp.config:DDPConfig",
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_replicate"}),
        join_uneven_inputs=True,
        async_save=True,
        handlers=frozenset({"DistributedDataParallelKwargs"}),
    ),
    preference=50,
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``ddp``."""
    return [DDP]
