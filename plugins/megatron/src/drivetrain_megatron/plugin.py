"""Registers the backend ``megatron``. Imports neither torch nor the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.api import BackendInfo, Capabilities, hookimpl

if TYPE_CHECKING:
    import click

MEGATRON = BackendInfo(
    name="megatron",
    aliases=("megatron_lm", "tensor_parallel", "pipeline_parallel"),
    summary="Tensor, pipeline and sequence parallelism around the unchanged loop; ddp, zero1 or fsdp beside them.",
    backend="drivetrain_megatron.backend:MegatronBackend",
    config="drivetrain_megatron.config:MegatronConfig",
    names={"MegatronLMPlugin": "drivetrain_megatron.accelerate:MegatronLMPlugin"},
    imports={"megatron_lm_config": "drivetrain_megatron.accelerate:RULES"},
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "tp"}),
        pipelined=True,
        replicated=False,
        optimizer_spans_models=False,
        sharded_save=True,
        async_save=True,
    ),
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``megatron``."""
    return [MEGATRON]


@hookimpl
def drivetrain_commands(group: click.Group) -> None:
    """``drivetrain plan``."""
    from drivetrain_megatron.commands import plan

    group.add_command(plan)
