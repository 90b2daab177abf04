"""Registers the backend ``deepspeed``. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.api import BackendInfo, Capabilities, hookimpl


def _implied(section: Any, origins: Mapping[str, str]) -> Mapping[str, tuple[Any, str]]:
    from drivetrain_deepspeed.engine_config import implied

    return implied(section, origins)


DEEPSPEED = BackendInfo(
    name="deepspeed",
    aliases=("zero",),
    summary="DeepSpeed ZeRO 0 to 3: optimizer states, gradients and parameters shared out over ranks, with offload.",
    backend="drivetrain_deepspeed.backend:DeepSpeedBackend",
    config="drivetrain_deepspeed.config:DeepSpeedConfig",
    names={"DeepSpeedPlugin": "drivetrain_deepspeed.accelerate:DeepSpeedPlugin"},
    imports={"deepspeed_config": "drivetrain_deepspeed.accelerate:RULES"},
    requires=("deepspeed>=0.19.8,<0.20",),
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_shard"}),
        # Stage 3 shares parameters out, stages 2 and 3 reduce each micro-batch: what holds for every stage is said.
        replicated=False,
        optimizer_spans_models=False,
        sharded_save=True,
        async_save=True,
    ),
    implied=_implied,
)


@hookimpl
def drivetrain_backends() -> list[BackendInfo]:
    """One backend: ``deepspeed``."""
    return [DEEPSPEED]
