"""Keeps the accelerators of this process and the started backend, for functions that are given neither.

``drivetrain.gather`` runs on the newest backend; ``AcceleratorState()`` is the newest accelerator's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final
from weakref import ref

import torch.distributed as dist

from drivetrain.backend import Backend, Capabilities, RunSettings
from drivetrain.distributed.collectives import TorchCollectives
from drivetrain.distributed.process_group import ProcessGroupHandle, ensure_process_group, pick_device
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain.topology import Mesh, ProcessInfo, Topology

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@final
class World(TorchCollectives, Backend):
    """A backend that only provides the collectives of the job; it trains nothing and is not in the registry."""

    capabilities = Capabilities(replicated=False)

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._handle: ProcessGroupHandle | None = None

    def start(self) -> Topology:
        """Pick the device and join the process group, forming it when there is none. Collective over all ranks."""
        device = pick_device(self.settings.device_type, self.settings.process)
        self._handle = ensure_process_group(self.settings.process, device.split(":")[0], self.settings.process_group)
        return self._lay(device, self._handle.communication_backend)

    def attach(self) -> Topology:
        """Use the process group that exists, or none, without a claim on it. Not collective."""
        device = pick_device(self.settings.device_type, self.settings.process)
        return self._lay(device, str(dist.get_backend()) if dist.is_initialized() else None)

    def _lay(self, device: str, communication_backend: str | None) -> Topology:
        mesh = Mesh({"dp_replicate": self.settings.process.world_size})
        self.topology = Topology(self.settings.process, mesh, device, communication_backend)
        return self.topology

    def prepare(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        training: bool = True,
    ) -> NoReturn:
        """Raise: this backend cannot train."""
        self._refuse_training(f"{type(model).__name__} was given")

    def synchronise_batch_norm(self, model: nn.Module) -> NoReturn:
        """Raise: this backend cannot train."""
        self._refuse_training(f"{type(model).__name__} was given")

    def autocast(self, enabled: bool = True) -> NoReturn:
        """Raise: this backend cannot train."""
        self._refuse_training("autocast was asked for")

    def _refuse_training(self, why: str) -> NoReturn:
        raise UnsupportedError(
            f"PartialState connects processes and does not train ({why})", cure="Use Accelerator().prepare(...)."
        )

    def stop(self) -> None:
        """Release the claim on the process group."""
        if self._handle is not None:
            self._handle.release()
            self._handle = None


_started: list[tuple[ref[Backend], str]] = []
"""Backends that run, held weakly so that forgetting an accelerator frees its own, with their names."""


def set_current_backend(backend: Backend, name: str = "") -> None:
    """Make a started backend the current one, until a newer one is set or it is forgotten or collected.

    Args:
        backend: the backend, started.
        name: what ``distributed_type`` calls it; empty for a backend that trains nothing.
    """
    forget_backend(backend)
    _started.append((ref(backend), name))


def forget_backend(backend: Backend) -> None:
    """Remove a backend that stops; the one set before it becomes current again."""
    _started[:] = [(one, name) for one, name in _started if one() not in (None, backend)]


def forget_all() -> None:
    """Remove all backends, and release the claims of :func:`keep`."""
    _started.clear()
    while _kept:
        _kept.pop().stop()


_kept: list[World] = []


def keep(world: World) -> None:
    """Keep a claim on the process group that no object of the script holds, until :func:`release`.

    ``PartialState().is_main_process`` is common in scripts.
    """
    _kept.append(world)


def release(world: World) -> None:
    """Give back a claim of :func:`keep`."""
    forget_backend(world)
    _kept[:] = [each for each in _kept if each is not world]
    world.stop()


def started_backend() -> tuple[Backend, str] | None:
    """The newest backend that is started and still alive with its name, if any."""
    for one, name in reversed(_started):
        backend = one()
        if backend is not None:
            return backend, name
    return None


def current_backend() -> Backend:
    """The newest started backend; without one, the script's own process group, or this process alone.

    Raises:
        UsageError: the launcher started several processes and nothing has connected them yet.
    """
    started = started_backend()
    if started is not None:
        return started[0]
    process = read_process_info(os.environ)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if (process.rank, process.world_size) != (rank, size):
            process = ProcessInfo(rank, size, rank, size)
    elif process.world_size > 1:
        raise UsageError(
            f"this is process {process.rank} of {process.world_size}, and they are not connected yet",
            cure="Create Accelerator() or PartialState() first, and keep it.",
        )
    world = World(RunSettings(process=process))
    world.attach()
    return world


# ---- accelerators ---------------------------------------------------------------------------------------------------

_accelerators: list[ref[Any]] = []


def remember(accelerator: Any) -> None:
    """Register a new accelerator; it is held weakly."""
    _accelerators[:] = [each for each in _accelerators if each() is not None]
    _accelerators.append(ref(accelerator))


def forget_accelerators() -> None:
    """Unregister all accelerators, which keep working."""
    _accelerators.clear()


def has_accelerator() -> bool:
    """Whether an accelerator was made that is still alive."""
    return any(each() is not None for each in _accelerators)


def newest_accelerator() -> Any:
    """The accelerator that was made last and is still alive.

    Raises:
        UsageError: there is none.
    """
    for each in reversed(_accelerators):
        accelerator = each()
        if accelerator is not None:
            return accelerator
    raise UsageError("there is no accelerator yet, so it has no state", cure="Create Accelerator() first.")
