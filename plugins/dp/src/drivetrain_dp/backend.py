"""Backend ``dp``: one process; ``torch.nn.DataParallel`` splits each batch over several devices.

The replicas' gradients are summed into the one set of parameters and the loss is taken on the joined output, so to the
core this is one data-parallel coordinate: nothing is averaged and no factor is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.api import (
    BackendBlockedError,
    DistributedBackend,
    Mesh,
    Topology,
    TorchEngine,
    TorchTrainable,
    Trainable,
    UnsupportedError,
    pick_device,
    place_model,
)
from drivetrain_dp.config import DPConfig
from drivetrain_dp.plugin import DP

logger = logging.getLogger(__name__)


@final
class DPTrainable(TorchTrainable):
    """A module behind DataParallel, or the module itself where there is one device.

    Replicas live for one forward and their gradients are summed by its backward.
    """

    def release(self) -> None:
        """Drop the wrapper."""
        self.model = self.module


@final
class DPBackend(DistributedBackend):
    """One process on all devices of a machine."""

    capabilities = DP.capabilities

    def start(self) -> Topology:
        section = self.settings.section or DPConfig()
        device = pick_device(self.settings.device_type, self.settings.process)
        self._device_ids = _device_ids(section.device_ids, device)
        if self._device_ids:
            device = f"{device.partition(':')[0]}:{self._device_ids[0]}"
        if len(self._device_ids) < 2:
            logger.warning(
                "dp has one device here (%s): it trains, but nothing runs in parallel. "
                "Use distributed_type: ddp to train in several processes.",
                device,
            )
        self.topology = Topology(self.settings.process, Mesh(), device)
        self._engine = TorchEngine(self.settings.precision, device)
        self.scaler = self._engine.scaler
        return self.topology

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, training: bool = True) -> Trainable:
        place_model(model, optimizers, self.settings, self.topology)
        trainable = DPTrainable(model, optimizers, self._engine)
        if len(self._device_ids) > 1:
            section = self.settings.section or DPConfig()
            trainable.model = nn.DataParallel(model, device_ids=self._device_ids, dim=section.dim)
        return trainable

    def synchronise_batch_norm(self, model: nn.Module) -> None:
        """One device sees the whole batch; the threads of several have no way to share statistics."""
        if len(self._device_ids) > 1:
            raise UnsupportedError(
                "dp splits a batch over several devices, and batch norms cannot take their statistics over all of them",
                cure="Use distributed_type: ddp with sync_batch_norm, or leave sync_batch_norm out.",
            )

    def join(self, trainables: Sequence[Trainable]) -> AbstractContextManager[Any]:
        """Do nothing: there is one process."""
        return nullcontext()

    def stop(self) -> None:
        """Do nothing: no resources are held."""


def _device_ids(asked: list[int] | None, device: str) -> list[int]:
    """The device indices to use; empty on the CPU.

    Raises:
        BackendBlockedError: an index that this machine does not have, or one asked for twice.
    """
    if device == "cpu":
        if asked:
            raise BackendBlockedError(
                f"dp: device_ids {asked} were asked for, but this run is on the CPU",
                cure="Remove device_ids, or run on a machine with accelerators.",
            )
        return []
    count = torch.accelerator.device_count()
    ids = list(range(count)) if asked is None else asked
    if len(set(ids)) != len(ids) or any(not 0 <= index < count for index in ids):
        raise BackendBlockedError(
            f"dp: device_ids {ids} do not fit this machine, whose devices are {list(range(count))}",
            cure="Name each device once.",
        )
    return ids
