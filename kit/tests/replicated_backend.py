"""A backend of five lines: gradients are averaged one by one. It is registered by the tests, not installed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from toy_backend import Plugin

from drivetrain.api import BackendInfo, Capabilities, ReplicatedBackend
from drivetrain.registry import get_registry

INFO = BackendInfo(
    name="averaging",
    summary="Averages gradients one by one.",
    backend="replicated_backend:AveragingBackend",
    capabilities=Capabilities(
        averages_gradients=True,
        mesh_axes=frozenset({"dp_replicate"}),
        async_save=True,
        join_uneven_inputs=True,
    ),
)


class AveragingBackend(ReplicatedBackend):
    """One replica a process."""

    capabilities = INFO.capabilities

    def average(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient, "mean"))


class SkippingBackend(AveragingBackend):
    """Leaves the first gradient out, as a mistake in an engine would."""

    def average(self, gradients: Sequence[Tensor]) -> None:
        super().average(gradients[1:])


def register() -> None:
    """Make ``averaging`` known to this process."""
    if INFO.name not in get_registry().names():
        get_registry().register(Plugin(INFO), name=INFO.name)
