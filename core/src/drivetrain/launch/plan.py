"""What a launch will do, decided before anything starts: how many processes, where they meet, and who trains.

Pure but for :func:`count_devices`, which asks torch when the user did not say how many processes to start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.errors import BackendBlockedError, BackendNotFoundError, ConfigError
from drivetrain.installed import core_version
from drivetrain.registry import get_registry

if TYPE_CHECKING:
    from drivetrain.config.resolved import ResolvedConfig

DEFAULT_PORT = 29500
"""Where machines meet when no port is given: torch's own default."""


@dataclass(frozen=True)
class LaunchPlan:
    """Numbers and addresses of one launch, as seen from this machine.

    Args:
        world_size: processes over all machines.
        processes_here: processes on this machine.
        num_machines: machines in the job.
        machine_rank: index of this machine.
        rdzv_backend: how machines meet, ``c10d`` or ``static``.
        rdzv_endpoint: where, ``host:port``; port 0 takes a free one.
        max_restarts: how often failed workers are started again.
        monitor_interval: seconds between two looks at the workers.
    """

    world_size: int
    processes_here: int
    num_machines: int = 1
    machine_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = "localhost:0"
    max_restarts: int = 0
    monitor_interval: float = 0.1


def make_plan(resolved: ResolvedConfig) -> LaunchPlan:
    """Read the launch keys of a configuration and check them against each other and against the backend.

    Raises:
        ConfigError: the numbers do not fit, or machines do not know where to meet.
        BackendError: the backend is absent, broken, or cannot train over this many processes.
    """
    config = resolved.config
    machines = config.num_machines
    world = config.num_processes
    if world is None:
        world = (1 if config.use_cpu else count_devices()) * machines
    if world % machines:
        raise ConfigError(
            f"num_processes: {world} cannot be shared equally by num_machines: {machines}",
            cure="num_processes counts the processes of all machines together; write a multiple of num_machines.",
        )
    if machines > 1 and not config.main_process_ip:
        raise ConfigError(
            f"num_machines is {machines} but main_process_ip is not set",
            cure="Write the address of machine 0 there, the same on every machine.",
        )
    check_backend(config.distributed_type, world)
    host = config.main_process_ip or "localhost"
    port = config.main_process_port or (DEFAULT_PORT if machines > 1 or config.rdzv_backend == "static" else 0)
    return LaunchPlan(
        world_size=world,
        processes_here=world // machines,
        num_machines=machines,
        machine_rank=config.machine_rank,
        rdzv_backend=config.rdzv_backend,
        rdzv_endpoint=f"{host}:{port}",
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
    )


def check_backend(name: str | None, world_size: int) -> str:
    """Return the backend that will train, after making sure that it can. Loads nothing heavy.

    Raises:
        BackendError: see :class:`drivetrain.registry.Registry`; :class:`BackendBlockedError` also when it trains in one
            process and ``world_size`` is larger.
    """
    registry = get_registry()
    if name is None:
        return registry.default(world_size).name
    info = registry.info(name)
    if world_size > 1 and not info.capabilities.multi_process:
        raise BackendBlockedError(
            f"backend {info.name!r} trains in one process, but {world_size} were asked for",
            whose=registry.owner(info.name),
            cure="Write num_processes: 1, or another distributed_type; `drivetrain backends` lists them.",
        )
    registry.check_ready(info)
    return info.name


def trains_over(name: str | None, world_size: int) -> bool:
    """Whether the backend of this name, or for ``None`` any that is taken unnamed, can train over so many processes."""
    try:
        check_backend(name, world_size)
    except (BackendBlockedError, BackendNotFoundError):
        return False
    return True


def describe(plan: LaunchPlan, resolved: ResolvedConfig) -> str:
    """Return one line that says what is about to be launched, by whom."""
    name = check_backend(resolved.config.distributed_type, plan.world_size)
    processes = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
    here = f", {plan.processes_here} of them on machine {plan.machine_rank}" if plan.num_machines > 1 else ""
    precision = resolved.config.mixed_precision
    precise = "" if precision == "no" else f", {precision}"
    return f"drivetrain {core_version()}: {name} ({get_registry().owner(name)}) on {processes}{here}{precise}"


def has_accelerator() -> bool:
    """Whether torch sees an accelerator. Imports torch."""
    import torch

    return bool(torch.accelerator.is_available())


def count_devices() -> int:
    """Return the number of accelerators on this machine, or 1 when there is none. Imports torch."""
    import torch

    return max(1, torch.accelerator.device_count()) if has_accelerator() else 1
