"""What the wizard need not ask: the accelerators of this machine, a Slurm allocation, and which backends can train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.cli.prompts import Choice
from drivetrain.errors import BackendError, sentences
from drivetrain.launch.devices import Inventory, take_inventory
from drivetrain.launch.environment import available_cores, first_host
from drivetrain.registry import Registry, known_extras, pip_line

BEST = "best"
"""The answer that leaves the backend to the core."""


@dataclass(frozen=True)
class Machine:
    """What is here.

    Args:
        inventory: accelerators that the environment does not hide.
        cores: that this process may use.
        machines: of the Slurm allocation in which the wizard runs; 1 elsewhere.
        first: name of the allocation's first machine; empty elsewhere.
    """

    inventory: Inventory
    cores: int
    machines: int = 1
    first: str = ""

    def __str__(self) -> str:
        slurm = f"; Slurm gives {self.machines} machines" if self.machines > 1 else ""
        return f"{self.inventory}, and {self.cores} cores{slurm}"


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """Look at this machine. Takes about as long as ``import torch``, which another process does."""
    environ = os.environ if environ is None else environ
    listed = environ.get("SLURM_JOB_NODELIST", "")
    return Machine(
        inventory=take_inventory((), environ),
        cores=available_cores(),
        machines=int(environ.get("SLURM_JOB_NUM_NODES") or 1),
        first=first_host(listed) if listed else "",
    )


def backend_choices(registry: Registry, world_size: int) -> tuple[Choice, ...]:
    """Every backend that is installed or could be, each with the reason why it cannot train here.

    Args:
        registry: who knows the backends.
        world_size: processes over all machines.
    """
    try:
        taken = registry.default(world_size).name
        choices = [Choice(BEST, f"What fits the number of processes: now {taken}.")]
    except BackendError as error:
        choices = [Choice(BEST, blocked="none fits", cure=str(error))]
    for report in registry.reports():
        blocked = cure = ""
        if not report.ready:
            why = report.why.removeprefix(f"backend {report.name!r} cannot run here: ")
            blocked, cure = "cannot run here", sentences(f"{why}.", report.cure)
        elif world_size > 1 and report.capabilities is not None and not report.capabilities.multi_process:
            blocked = f"trains in one process, not in {world_size}"
        choices.append(Choice(report.name, report.summary, blocked, cure))
    present = {choice.value for choice in choices}
    choices += [
        Choice(extra, blocked="not installed", cure=f"It is not installed. Run: {pip_line(extra)}")
        for extra in known_extras()
        if extra not in present
    ]
    return tuple(choices)
