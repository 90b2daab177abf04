"""Which backend a function without an accelerator at hand (``drivetrain.gather(tensor)``) runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, final
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from drivetrain.backend import Backend, Capabilities, RunSettings
from drivetrain.data.active import ActiveLoaders
from drivetrain.distributed.device import pick_device
from drivetrain.distributed.process_group import ProcessGroupHandle, ensure_process_group
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.launch.environment import read_place
from drivetrain.topology import Mesh, Place, Topology

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

# ---- The backend of those who only want to talk to the other processes: ``PartialState`` and functions on their own

@final
class World(Backend):
    """All processes of the job and their collectives; trains nothing, so it has no name in the registry."""

    capabilities = Capabilities(replicated=False)

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


# ---- Which backend a function without an accelerator at hand (``drivetrain.gather(tensor)``) runs on

@dataclass(frozen=True, slots=True)
class Started:
    """A backend that is running.

    Args:
        backend: held weakly, so that forgetting an accelerator frees it.
        name: its canonical name; empty when it has none (``PartialState``).
    """

    backend: ref[Backend]
    name: str


_started: list[Started] = []
_loaders: WeakKeyDictionary[Backend, ActiveLoaders] = WeakKeyDictionary()


def set_current_backend(backend: Backend, name: str = "") -> None:
    """Make a started backend the current one, until a newer is set or it is forgotten or garbage.

    Args:
        backend: the backend, started.
        name: what ``distributed_type`` calls it; empty for a backend that trains nothing.
    """
    forget_backend(backend)
    _started.append(Started(ref(backend), name))


def forget_backend(backend: Backend) -> None:
    """Take a backend that stops out of the running; the one set before it becomes current again."""
    _started[:] = [one for one in _started if one.backend() not in (None, backend)]


def set_loaders(backend: Backend, active: ActiveLoaders) -> None:
    """Say which loaders feed the script that runs on this backend."""
    _loaders[backend] = active


def loaders_of(backend: Backend) -> ActiveLoaders | None:
    """The loaders of the script that runs on this backend, if it has prepared any."""
    return _loaders.get(backend)


def forget_all() -> None:
    """As if no Accelerator and no PartialState had ever been made."""
    _started.clear()


def started_backend() -> tuple[Backend, str] | None:
    """The newest backend that is started and still alive with its name, if any."""
    for one in reversed(_started):
        backend = one.backend()
        if backend is not None:
            return backend, one.name
    return None


def current_backend() -> Backend:
    """The newest started backend; without one, the script's own process group, or this process alone.

    Raises:
        UsageError: the launcher started several processes and nothing has connected them yet.
    """
    started = started_backend()
    if started is not None:
        return started[0]
    place = read_place(os.environ)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if (place.rank, place.world_size) != (rank, size):
            place = Place(rank, size, rank, size)
    elif place.world_size > 1:
        raise UsageError(
            f"this is process {place.rank} of {place.world_size}, and they are not connected yet",
            cure="Create Accelerator() or PartialState() first, and keep it.",
        )
    world = World(RunSettings(place=place))
    world.attach()
    return world

