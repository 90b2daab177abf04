"""Implements the base of backends whose processes communicate by ``torch.distributed``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from drivetrain.backend import Backend
from drivetrain.distributed.collectives import TorchCollectives
from drivetrain.distributed.process_group import ProcessGroupHandle, ensure_process_group, pick_device
from drivetrain.loop import batch_norm, precision
from drivetrain.topology import Mesh, Topology


class DistributedBackend(TorchCollectives, Backend):
    """Implements collectives, autocast and synchronised batch norms by torch.

    A backend adds :meth:`start`, :meth:`prepare` and :meth:`stop`. :meth:`start` sets ``topology``, whose mesh says
    which ranks read different samples; with one process no process group is needed.
    """

    def join_replicas(self) -> ProcessGroupHandle:
        """Pick the device, join the process group, and set ``topology`` to a mesh of replicas. Collective.

        Called by :meth:`start` of a backend that keeps a replica in every process.

        Returns:
            The claim on the process group, which :meth:`stop` releases.
        """
        settings = self.settings
        device = pick_device(settings.device_type, settings.process)
        group = ensure_process_group(settings.process, device.partition(":")[0], settings.process_group)
        mesh = Mesh(settings.mesh or {"dp_replicate": settings.process.world_size})
        self.topology = Topology(settings.process, mesh, device, group.communication_backend)
        return group

    def synchronise_batch_norm(self, model: nn.Module) -> None:
        batch_norm.convert(model, self.topology)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        return precision.autocast(self.settings.precision, self.topology.device, enabled)
