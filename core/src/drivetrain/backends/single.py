"""The reference backend: one process that runs the user's module and optimizer unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from drivetrain.api import (
    DistributedBackend,
    Mesh,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    pick_device,
    place_model,
)
from drivetrain.backends.plugin import SINGLE


@final
class SingleBackend(DistributedBackend):
    """One process on one device."""

    capabilities = SINGLE.capabilities

    def start(self) -> Topology:
        device = pick_device(self.settings.device_type, self.settings.process)
        self.topology = Topology(self.settings.process, Mesh(), device)
        self._engine = TorchEngine(self.settings.precision, device)
        self.scaler = self._engine.scaler
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        place_model(model, optimizers, self.settings, self.topology)
        return TorchTrainable(model, optimizers, self._engine)

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """Do nothing: there is one process."""
        return nullcontext()

    def stop(self) -> None:
        """Do nothing: no resources are held."""
