"""Registers the backend ``xla`` and the device of TPU stacks. Imports neither torch nor an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drivetrain.api import BackendInfo, Capabilities, hookimpl
from drivetrain_xla import chips
from drivetrain_xla.probing import probe

XLA = BackendInfo(
    name="xla",
    aliases=("tpu", "torch_xla"),
    summary="torch_xla: lazy tensors compiled by XLA, for TPUs; several devices by processes or as one mesh (SPMD).",
    backend="drivetrain_xla.backend:XLABackend",
    config="drivetrain_xla.config:XLAConfig",
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_replicate", "dp_shard", "tp"}),
        devices=frozenset({"xla"}),
        precisions=frozenset({"no", "bf16"}),
    ),
    probe=probe,
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``xla``."""
    return [XLA]


@hookimpl
def drivetrain_devices() -> Sequence[Mapping[str, str]]:
    """TorchTPU's device ``tpu``, which the backends of torch itself train on."""
    return [chips.description()]
