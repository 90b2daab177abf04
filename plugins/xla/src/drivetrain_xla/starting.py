"""Initializes torch_xla in this process: device type, SPMD mesh, rank and world size.

Some of it can be set once per process: the device type, the number of devices, SPMD mode, the cache.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.api import BackendBlockedError, ProcessInfo, RunSettings, UnsupportedError
from drivetrain_xla import chips, layout, private_names
from drivetrain_xla.config import XLAConfig
from drivetrain_xla.probing import DEVICE

logger = logging.getLogger(__name__)

CPU_DEVICES = "CPU_NUM_DEVICES"
LAUNCHED = "PJRT_LOCAL_PROCESS_COUNT"
"""Set in the processes that ``torch_xla.launch`` starts."""
LAUNCHER = "torch_xla.launch"
"""Launcher of processes without a launcher's environment variables."""


@dataclass(frozen=True)
class Started:
    """Properties of the initialized torch_xla runtime.

    Args:
        process: rank and world size of this process; without a launcher, those of torch_xla.
        device: torch's name, ``"xla:0"``.
        hardware: ``"CPU"``, ``"TPU"``, ...
        mesh: sizes of the axes over this process's devices, ``None`` when it drives one.
        spans_processes: XLA's own collectives reach the other processes.
    """

    process: ProcessInfo
    device: str
    hardware: str
    mesh: dict[str, int] | None
    spans_processes: bool


def start(settings: RunSettings, section: XLAConfig) -> Started:
    """Initialize torch_xla. Not collective on a CPU; collective over all processes on TPUs.

    Raises:
        BackendBlockedError: no such device, or fewer than configured.
        UnsupportedError: devices as threads, or a mesh over several processes.
    """
    hardware = _choose(settings.device_type)
    import torch_xla
    import torch_xla.runtime as xr

    private_names.check()
    process = settings.process
    if section.compilation_cache is not None:
        _keep_graphs(Path(section.compilation_cache), hardware)
    as_mesh = _as_mesh(settings, section, hardware)
    if as_mesh:
        return _start_mesh(settings, hardware)
    if process.world_size > 1 and hardware == "TPU":
        from torch_xla._internal import pjrt

        # Assignment of chips to processes; torch_xla.launch would have set it.
        pjrt.initialize_multiprocess(process.local_rank, process.local_world_size)
    if xr.is_spmd():
        raise UnsupportedError(
            "this process has begun as one mesh of devices (SPMD), and torch_xla cannot leave that",
            cure="Use one mesh for all accelerators of a process.",
        )
    device = str(torch_xla.device())
    _refuse_threads(xr.addressable_device_count())
    spans = xr.world_size() > 1
    if process.world_size == 1 and spans:
        process = ProcessInfo(
            xr.global_ordinal(),
            xr.world_size(),
            xr.local_ordinal(),
            xr.local_process_count(),
            xr.host_index(),
            max(1, xr.world_size() // xr.local_process_count()),
            LAUNCHER,
        )
    elif process.world_size > 1 and hardware != "CPU" and xr.world_size() != process.world_size:
        raise BackendBlockedError(
            f"{process.launcher} started {process.world_size} processes, "
            f"the {hardware} runtime counts {xr.world_size()}",
            cure="Start one process for each chip, or one process and mesh: for all chips of this machine.",
        )
    return Started(process, device, hardware, None, spans)


def _choose(device_type: str | None) -> str:
    """Settle ``PJRT_DEVICE`` before torch_xla is imported, which otherwise settles it by itself, with a warning."""
    asked = os.environ.get(DEVICE)
    if device_type == "cpu":
        if asked not in (None, "CPU"):
            raise BackendBlockedError(
                f"use_cpu is set, but the environment says {DEVICE}={asked}", cure="Unset one of the two."
            )
        asked = "CPU"
    elif asked is None:
        if not chips.present():
            raise BackendBlockedError(
                "this machine has no TPU",
                whose="the backend xla",
                cure=f"Write use_cpu: true (--cpu) to run XLA on the CPU, or {DEVICE}= another of its devices.",
            )
        asked = "TPU"
    os.environ[DEVICE] = asked
    return asked


def _as_mesh(settings: RunSettings, section: XLAConfig, hardware: str) -> bool:
    """Whether this process drives its devices as one mesh."""
    asked = any(size > 1 for size in settings.mesh.values())
    if section.spmd is False and asked:
        raise UnsupportedError(
            "mesh: names sizes above 1, but xla.spmd is false", cure="Leave one of the two out of the configuration."
        )
    wanted = section.spmd or asked
    if wanted and settings.process.world_size > 1:
        raise UnsupportedError(
            f"xla trains one mesh in one process, {settings.process.launcher} started {settings.process.world_size}",
            cure="Write num_processes: 1: that process drives all devices of the machine. Without mesh: and spmd: "
            "there may be one process for each device.",
        )
    if wanted or section.spmd is False or settings.process.world_size > 1 or LAUNCHED in os.environ:
        return bool(wanted)
    if hardware == "CPU":
        return int(os.environ.get(CPU_DEVICES, "1")) > 1
    return hardware == "TPU" and chips.usable(os.environ) > 1


def _start_mesh(settings: RunSettings, hardware: str) -> Started:
    import torch_xla
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        xr.use_spmd()
    if xr.process_count() > 1:
        raise UnsupportedError(
            f"a mesh over {xr.process_count()} hosts is not supported", cure="Start one process for each chip instead."
        )
    sizes = layout.device_mesh_sizes(settings.mesh, xr.global_runtime_device_count())
    return Started(replace(settings.process), str(torch_xla.device()), hardware, sizes, spans_processes=False)


def _refuse_threads(num_devices: int) -> None:
    """Torch_xla runs the devices of a CPU, and the two cores of old TPUs, as threads of one process."""
    if num_devices > 1 and threading.current_thread() is not threading.main_thread():
        raise UnsupportedError(
            f"torch_xla.launch runs the {num_devices} devices of this process as threads, whose collectives XLA aborts",
            cure="Start the script without torch_xla.launch: one process then drives all devices as a mesh. Or set "
            f"{CPU_DEVICES}=1.",
        )


def _keep_graphs(folder: Path, hardware: str) -> None:
    """Switch the cache of compiled graphs on, once a process."""
    import torch_xla
    import torch_xla.runtime as xr

    library: Any = torch_xla._XLAC  # noqa: SLF001  (what initialize_cache itself asks)
    if library._xla_computation_cache_is_initialized():  # noqa: SLF001
        return
    if hardware == "CPU":
        logger.warning("compilation_cache: XLA writes graphs of a CPU to %s and cannot read them again.", folder)
    folder.mkdir(parents=True, exist_ok=True)
    xr.initialize_cache(str(folder), readonly=False)


def meet() -> str:
    """Return the rendezvous address of processes started by torch_xla."""
    import torch_xla.distributed.xla_backend  # noqa: F401  (registers the address's scheme)

    return "xla://"
