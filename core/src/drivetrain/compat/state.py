"""Implements Accelerate's singletons ``PartialState`` and ``AcceleratorState``, which keep no state.

State lives on the accelerator, of which several may coexist; the singletons look up the newest one.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any, final

import torch

from drivetrain.backend import ProcessGroupSettings, RunSettings
from drivetrain.config import worker_config
from drivetrain.distributed.current import (
    World,
    current_backend,
    forget_accelerators,
    forget_all,
    has_accelerator,
    keep,
    newest_accelerator,
    release,
    set_current_backend,
    started_backend,
)
from drivetrain.distributed.process_control import ProcessControl
from drivetrain.distributed.process_group import available_device_type
from drivetrain.distributed_type import DistributedType
from drivetrain.errors import UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain.logging import set_rank
from drivetrain.registry import get_registry

logger = logging.getLogger(__name__)


@final
class PartialState(ProcessControl):
    """The process's ranks and process control, before or without an :class:`Accelerator`.

    The first one joins the process group, forming it when a launcher started several processes (collective over all
    ranks then). One made later, with the same wishes, or beside a started ``Accelerator``, shares what is there.

    Args:
        cpu: stay on the CPU even where there is an accelerator.
        init_pg_kwargs: how to form the process group: ``backend`` (gloo, nccl, ...), ``init_method``, ``timeout`` (a
            ``timedelta``). They lay over the configuration's ``process_group``.

    Attributes:
        backend: name of the communication backend, ``None`` when one process runs alone.
        debug: whether collectives compare shapes first (``debug`` of the configuration).

    Raises:
        UsageError: a keyword argument that has no meaning here, or one that comes too late because the process group
            exists already.
    """

    backend: str | None

    def __init__(self, cpu: bool = False, **init_pg_kwargs: Any) -> None:
        group = _group_settings(init_pg_kwargs)
        config = worker_config().config
        self.debug = config.debug
        started = started_backend()
        if started is not None and (not cpu or started[0].topology.device == "cpu"):
            if init_pg_kwargs:
                raise UsageError(
                    f"the process group exists already; {', '.join(sorted(init_pg_kwargs))} can no longer be chosen",
                    cure="Give these to the first PartialState or Accelerator of the process.",
                )
            job, self._name = started
        else:
            asked = config.process_group
            settings = RunSettings(
                process=read_process_info(os.environ),
                device_type="cpu" if cpu or config.use_cpu else None,
                process_group=ProcessGroupSettings(
                    group.communication_backend or asked.communication_backend,
                    group.init_method or asked.init_method,
                    group.timeout_seconds or asked.timeout_seconds,
                ),
            )
            world = World(settings)
            world.start()
            keep(world)
            job, self._name = world, ""
            set_current_backend(world)
            set_rank(world.topology.rank, world.topology.world_size, world.barrier)
        super().__init__(job)
        self.backend = self._topology.communication_backend

    @property
    def distributed_type(self) -> DistributedType:
        """Name of the backend that trains here, or of the default one."""
        return DistributedType(self._name or get_registry().default(self._topology.world_size).name, self.device.type)

    @property
    def initialized(self) -> bool:
        """Always ``True``: the state is complete when ``__init__`` returns."""
        return True

    @property
    def default_device(self) -> torch.device:
        """Device type that torch detects on this machine, whatever the settings."""
        return torch.device(available_device_type())

    def set_device(self) -> None:
        """Make this process's device torch's current one again."""
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def destroy_process_group(self) -> None:
        """Release this claim on the process group; the last one destroys it. Called on every rank, does not block.

        An ``Accelerator`` that uses the group keeps it until its ``end_training``.
        """
        if isinstance(self._job, World):
            release(self._job)
        else:
            logger.warning("the process group is in use by an Accelerator; its end_training() gives it back.")

    @staticmethod
    def _reset_state() -> None:
        """Reset every state of this process and release the claims on the process group."""
        forget_all()

    def __repr__(self) -> str:
        place = f"process {self.process_index} of {self._topology.world_size}, local {self.local_process_index}"
        return f"PartialState({place}, {self.device}, communication backend: {self.backend})"


def _group_settings(given: dict[str, Any]) -> ProcessGroupSettings:
    unknown = sorted(set(given) - {"backend", "init_method", "timeout"})
    if unknown:
        raise UsageError(
            f"PartialState does not know {', '.join(unknown)}",
            cure="It takes cpu, backend, init_method and timeout.",
        )
    timeout = given.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise UsageError(
                f"timeout must be a datetime.timedelta, not {type(timeout).__name__}",
                cure="Write datetime.timedelta(seconds=1800).",
            )
    seconds = None if timeout is None else timeout.total_seconds()
    return ProcessGroupSettings(given.get("backend"), given.get("init_method"), seconds)


def is_initialized() -> bool:
    """Whether there is an accelerator whose state ``AcceleratorState()`` would give."""
    return has_accelerator()


@final
class AcceleratorState:
    """``AcceleratorState()`` is the newest accelerator's ``state``.

    Raises:
        UsageError: there is no accelerator.
    """

    def __new__(cls) -> Any:
        """Return the newest accelerator's state."""
        return newest_accelerator().state

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Unregister all accelerators, which keep working; ``reset_partial_state``: those of ``PartialState`` too."""
        forget_accelerators()
        if reset_partial_state:
            forget_all()


def wait_for_everyone() -> None:
    """Wait until every process has made this call. Collective over all ranks."""
    current_backend().barrier()
