"""Selects this process's device through ``torch.accelerator``."""

from __future__ import annotations

import os

import torch

from drivetrain.backend import ProcessInfo
from drivetrain.errors import BackendBlockedError
from drivetrain.launch.devices import hiding, known_kinds
from drivetrain.registry import get_registry


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
