"""Implements Accelerate's singletons ``PartialState``, ``AcceleratorState`` and ``GradientState``, which keep no state.

State lives on the accelerator, of which several may coexist; the singletons look up the newest one.
"""

from __future__ import annotations

import logging
import os
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from drivetrain.backend import ProcessGroupSettings, RunSettings
from drivetrain.backends.torch_engine import original_module
from drivetrain.compat.names import DistributedType
from drivetrain.config import worker_config
from drivetrain.distributed.current import (
    World,
    current_backend,
    forget_all,
    forget_backend,
    set_current_backend,
    started_backend,
)
from drivetrain.distributed.process_control import ProcessControl
from drivetrain.distributed.process_group import available_device_type
from drivetrain.errors import UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain.logging import set_rank
from drivetrain.loop.model import prepared_model
from drivetrain.loop.wrappers import without_compile
from drivetrain.registry import get_registry

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.data.active import ActiveLoaders
    from drivetrain.loop.accumulation import TrainingLoop

logger = logging.getLogger(__name__)

# `PartialState().is_main_process` is common in scripts: the first one's claim on the process group is kept.
_kept: list[World] = []


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
            _kept.append(world)
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
            forget_backend(self._job)
            _kept[:] = [world for world in _kept if world is not self._job]
            self._job.stop()
        else:
            logger.warning("the process group is in use by an Accelerator; its end_training() gives it back.")

    @staticmethod
    def _reset_state() -> None:
        """Reset every state of this process and release the claims on the process group."""
        forget_all()
        while _kept:
            _kept.pop().stop()

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


# ---- newest accelerator ---------------------------------------------------------------------------------------------

_made: list[weakref.ref[Accelerator]] = []


def remember(run: Accelerator) -> None:
    """Register a new accelerator; it is held weakly."""
    _made[:] = [each for each in _made if each() is not None]
    _made.append(weakref.ref(run))


def newest_accelerator() -> Accelerator | None:
    """The accelerator that was made last and is still alive."""
    for each in reversed(_made):
        run = each()
        if run is not None:
            return run
    return None


def is_initialized() -> bool:
    """Whether there is an accelerator whose state ``AcceleratorState()`` would give."""
    return newest_accelerator() is not None


@final
class AcceleratorState:
    """``AcceleratorState()`` is the newest accelerator's ``state``.

    Raises:
        UsageError: there is no accelerator.
    """

    def __new__(cls) -> Any:
        """Return the newest accelerator's state."""
        run = newest_accelerator()
        if run is None:
            raise UsageError("there is no accelerator yet, so it has no state", cure="Create Accelerator() first.")
        return run.state

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Unregister all accelerators, which keep working; ``reset_partial_state``: those of ``PartialState`` too."""
        _made.clear()
        if reset_partial_state:
            PartialState._reset_state()  # noqa: SLF001 (Accelerate's name for it)


@final
class GradientState:
    """Position of the loop in its window and its loader: ``accelerator.gradient_state``, computed on access.

    ``GradientState()`` is the newest accelerator's; it raises as :class:`AcceleratorState` does.

    Args:
        loop: knows the windows.
        active: knows the loaders being iterated.
    """

    _loop: TrainingLoop
    _active: ActiveLoaders

    def __new__(cls, loop: TrainingLoop | None = None, active: ActiveLoaders | None = None) -> GradientState:
        """Return the newest accelerator's, or make one for an accelerator."""
        if loop is None or active is None:
            found: GradientState = AcceleratorState().gradient_state
            return found
        self = super().__new__(cls)
        self._loop, self._active = loop, active
        return self

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: the state is computed from the accelerator's loop."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window."""
        return self._loop.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._loop.steps

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._active.current is not None

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader being iterated, or ``None``."""
        current = self._active.current
        return None if current is None else current.loader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader's current batch is its last."""
        return self._active.is_last_batch()

    @property
    def remainder(self) -> int:
        """Rows that count in the current global batch when it is short, else -1."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)


def wait_for_everyone() -> None:
    """Wait until every process has made this call. Collective over all ranks."""
    current_backend().barrier()


def extract_model_from_parallel(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
    """The model itself: what ``prepare`` returns is the user's own object.

    Args:
        model: a prepared model, its ``model.module``, or one in a wrapper of torch that the script made.
        keep_fp32_wrapper: accepted either way: there is no such wrapper.
        keep_torch_compile: ``False`` takes off what ``torch.compile`` and torch's ``checkpoint_wrapper`` have put
            around it and its parts. Where there is such a part, the result is a copy of the modules around it, with
            the same parameters and buffers, that no engine trains; the model itself is left as it is.
    """
    del keep_fp32_wrapper
    prepared = prepared_model(model)
    model = model if prepared is None else prepared.source
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    if keep_torch_compile or not isinstance(model, nn.Module):
        return model
    own = original_module(model)
    prepared = prepared_model(own)
    return without_compile(own, type(own) if prepared is None else prepared.plain_class)

