"""Base of backends whose processes communicate by ``torch.distributed``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from drivetrain.backend import Backend
from drivetrain.distributed.collectives import TorchCollectives
from drivetrain.loop import batch_norm, precision


class DistributedBackend(TorchCollectives, Backend):
    """Implements collectives, autocast and synchronised batch norms by torch.

    A backend adds :meth:`start`, :meth:`prepare` and :meth:`stop`. :meth:`start` sets ``topology``, whose mesh says
    which ranks read different samples; with one process no process group is needed.
    """

    def synchronise_batch_norm(self, model: nn.Module) -> None:
        batch_norm.convert(model, self.topology)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        return precision.autocast(self.settings.precision, self.topology.device, enabled)
