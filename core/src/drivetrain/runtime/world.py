"""The backend of those who only want to talk to the other processes: ``PartialState`` and functions on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, final

import torch.distributed as dist

from drivetrain.backend import Backend, Capabilities, RunSettings
from drivetrain.errors import UnsupportedError
from drivetrain.runtime.device import pick_device
from drivetrain.runtime.process_group import ProcessGroupHandle, ensure_process_group
from drivetrain.topology import Mesh, Topology

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@final
class World(Backend):
    """All processes of the job and their collectives; trains nothing, so it has no name in the registry."""

    capabilities = Capabilities(replicated=False, multiple_models=False)

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._handle: ProcessGroupHandle | None = None

    def start(self) -> Topology:
        """Pick the device and join the process group, forming it when there is none. Collective over all ranks."""
        device = pick_device(self.settings.device_type, self.settings.place)
        self._handle = ensure_process_group(self.settings.place, device.split(":")[0], self.settings.process_group)
        return self._lay(device, self._handle.communication_backend)

    def attach(self) -> Topology:
        """Use the process group that exists, or none, without a claim on it. Not collective."""
        device = pick_device(self.settings.device_type, self.settings.place)
        return self._lay(device, str(dist.get_backend()) if dist.is_initialized() else None)

    def _lay(self, device: str, communication_backend: str | None) -> Topology:
        mesh = Mesh({"dp_replicate": self.settings.place.world_size})
        self.topology = Topology(self.settings.place, mesh, device, communication_backend)
        return self.topology

    def prepare(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        training: bool = True,
    ) -> NoReturn:
        """Refuse: there is nothing here that could train."""
        raise UnsupportedError(
            f"PartialState connects processes and does not train ({type(model).__name__} was given)",
            cure="Use Accelerator().prepare(...).",
        )

    def stop(self) -> None:
        """Give the claim on the process group back."""
        if self._handle is not None:
            self._handle.release()
            self._handle = None
