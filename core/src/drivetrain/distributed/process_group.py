"""Joins this process to the job: selects its device, and forms, shares and destroys the default process group."""

from __future__ import annotations

import atexit
import gc
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from drivetrain.backend import ProcessGroupSettings
from drivetrain.errors import BackendBlockedError, EnvironmentVariableError
from drivetrain.launch.devices import hiding, known_kinds
from drivetrain.launch.environment import meeting_point
from drivetrain.registry import get_registry
from drivetrain.topology import ProcessInfo


def available_device_type() -> str:
    """The accelerator that torch finds on this machine, else ``"cpu"``."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if current is None else current.type


def pick_device(device_type: str | None, process: ProcessInfo) -> str:
    """Device of this process, e.g. ``"cuda:1"``, made the current one; ``"cpu"`` needs no index.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...; ``None`` = what this machine has.
        process: its ``local_rank`` numbers the devices of this machine.

    Raises:
        BackendBlockedError: the machine has no such device, or fewer than processes.
    """
    kind = device_type or available_device_type()
    if kind == "cpu":
        return "cpu"
    found = available_device_type()
    if found != kind:
        hidden = hiding(os.environ, kind, known_kinds(get_registry().devices()))
        raise BackendBlockedError(
            f"this machine has no {kind} device that torch {torch.__version__} can use (it finds: {found})",
            whose="" if hidden is None else f"{hidden} hides devices",
            cure="Run with --cpu, or install a torch built for this accelerator."
            if hidden is None
            else f"`unset {hidden.partition('=')[0]}`, or run with --cpu.",
        )
    count = torch.accelerator.device_count()
    if kind == "mps":
        return "mps"
    if process.local_rank >= count:
        raise BackendBlockedError(
            f"{process.local_world_size} processes on this machine need as many {kind} devices, it has {count}",
            whose=f"local rank {process.local_rank}",
            cure=f"Start at most {count} here (--num_processes {count}), or run with --cpu.",
        )
    torch.accelerator.set_device_index(process.local_rank)
    return f"{kind}:{process.local_rank}"


# Gloo's worker threads hold the last collective's objects for a moment. Where they outlive the interpreter, the process
# aborts; where they take the interpreter's lock while the group's destructor waits for them with that lock, it hangs.
# So they are given this long before the group is destroyed.
DRAIN_SECONDS = 0.1


class _Groups:
    """The process groups that this process has formed."""

    holders = 0
    """Number of handles that keep the current group alive."""
    generation = 0
    """Number of groups formed so far, the same on every rank."""
    stores: ClassVar[dict[tuple[object, ...], Any]] = {}
    """Rendezvous stores by address. Kept, since the process that serves one cannot serve a second at the same port."""


@dataclass
class ProcessGroupHandle:
    """A counted reference to the default process group.

    Args:
        communication_backend: gloo, nccl, ...; ``None`` when one process runs alone and no group exists.
        counted: this handle keeps the group alive.
    """

    communication_backend: str | None
    counted: bool = False

    def release(self) -> None:
        """Release the reference; the last destroys the group if we formed it. Not collective. May be called twice."""
        if not self.counted:
            return
        self.counted = False
        _Groups.holders -= 1
        if _Groups.holders == 0:
            _destroy()


def ensure_process_group(
    process: ProcessInfo, device_type: str, settings: ProcessGroupSettings, *, alone: bool = False
) -> ProcessGroupHandle:
    """Join the default process group, forming it when there is none. Collective over all ranks when it forms.

    An existing group is used as it is and never destroyed by us. A single process forms none, unless its
    engine needs one.

    Args:
        process: ranks, as the launcher gave them.
        device_type: what torch's default communication backend is chosen for.
        settings: the user's settings.
        alone: form a group of one too, without a rendezvous.

    Raises:
        EnvironmentVariableError: the group that exists has another size than the launcher announced.
        BackendBlockedError: the communication backend is for accelerators, and this process trains on the CPU.
    """
    _keep_in_forks()
    if dist.is_initialized():
        if dist.get_world_size() != process.world_size or dist.get_rank() != process.rank:
            raise EnvironmentVariableError(
                f"the process group that exists is rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"the launcher announced rank {process.rank} of {process.world_size}",
                cure="Form the process group after the launcher's variables are set, or let Drivetrain form it.",
            )
        if _Groups.holders:
            _Groups.holders += 1
        return ProcessGroupHandle(str(dist.get_backend()), counted=_Groups.holders > 0)
    if process.world_size == 1 and not alone:
        return ProcessGroupHandle(None)
    chosen = settings.communication_backend or dist.get_default_backend_for_device(device_type)
    _check_devices(chosen, device_type)
    timeout = default_pg_timeout
    if settings.timeout_seconds is not None:
        timeout = timedelta(seconds=settings.timeout_seconds)
    init_method = settings.init_method or os.environ.get("DRIVETRAIN_INIT_METHOD") or _rendezvous_method()
    dist.init_process_group(
        chosen,
        store=dist.HashStore() if process.world_size == 1 else _store(process, init_method, timeout),  # type: ignore[attr-defined]
        rank=process.rank,
        world_size=process.world_size,
        timeout=None if settings.timeout_seconds is None else timeout,
    )
    if _Groups.holders == 0:
        atexit.register(_destroy)
    _Groups.holders += 1
    return ProcessGroupHandle(chosen, counted=True)


@cache
def _keep_in_forks() -> None:
    """Keep processes forked from here on (a DataLoader's workers) from collecting garbage of this one.

    A process group or store in a reference cycle, an engine's for instance, waits for the garbage collector. A fork in
    between that collects it joins threads which only this process has: it hangs, or dies by SIGSEGV or SIGABRT.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _rendezvous_method() -> str:
    """The init method: the common variables, or the address derived from a cluster launcher's variables."""
    point = meeting_point(os.environ)
    return "env://" if point is None else f"tcp://{point[0]}:{point[1]}"


def _check_devices(communication_backend: str, device_type: str) -> None:
    """Refuse nccl and similar backends on the CPU, where torch would fail at the first collective."""
    # gloo runs on the CPU, and Apple's devices use it too.
    if device_type != "cpu" or communication_backend == "gloo":
        return
    kinds = known_kinds(get_registry().devices())
    needed = next((kind.type for kind in kinds if kind.communication_backend == communication_backend), "cpu")
    if needed == "cpu":
        return
    hidden = hiding(os.environ, needed, kinds)
    raise BackendBlockedError(
        f"communication backend {communication_backend!r} is for {needed} devices, and this process trains on the CPU",
        whose="" if hidden is None else f"{hidden} hides devices",
        cure="Write process_group: {communication_backend: gloo}"
        + (", or leave it to Drivetrain." if hidden is None else f", or `unset {hidden.partition('=')[0]}`."),
    )


def _store(process: ProcessInfo, init_method: str, timeout: timedelta) -> Any:
    """A store of its own for each group: a launcher's store outlives a group, and its keys would mislead the next."""
    address = (init_method, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), process)
    store = _Groups.stores.get(address)
    if store is None:
        store, _, _ = next(rendezvous(init_method, process.rank, process.world_size, timeout=timeout))
        _Groups.stores[address] = store
    _Groups.generation += 1
    return dist.PrefixStore(f"drivetrain/{_Groups.generation}", store)  # type: ignore[attr-defined]


def _destroy() -> None:
    """Let the group's threads drain, and destroy it."""
    _Groups.holders = 0
    if dist.is_initialized():
        gc.collect()
        time.sleep(DRAIN_SECONDS)
        dist.destroy_process_group()
