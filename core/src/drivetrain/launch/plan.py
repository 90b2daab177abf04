"""Plans a launch before anything starts: the number of processes, their devices and the backend.

Reads only the environment and, for the number of accelerators, torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from drivetrain.config.schema import RendezvousConfig, machine_range
from drivetrain.errors import BackendBlockedError, BackendError, BackendNotFoundError, ConfigError
from drivetrain.launch.devices import (
    DeviceRequest,
    Inventory,
    Selection,
    check_count,
    choose,
    known_kinds,
    take_inventory,
)
from drivetrain.launch.environment import DEFAULT_PORT, available_cores, find_machine
from drivetrain.registry import core_version, get_registry

if TYPE_CHECKING:
    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.launch.machines import Machine


@dataclass(frozen=True)
class LaunchPlan:
    """Numbers and addresses of one launch, as seen from this machine.

    Args:
        world_size: processes over all machines.
        processes_here: processes on this machine.
        num_machines: machines in the job; of an elastic one, the most.
        machine_rank: index of this machine.
        rdzv_endpoint: rendezvous address, ``host:port``; port 0 takes a free one.
        max_restarts: how often failed workers are started again.
        monitor_interval: seconds between two looks at the workers.
        selection: the accelerators that the workers of this machine see.
        rendezvous: how long machines wait for each other.
        fewest_machines: the minimum for an elastic job; 0 means all.
        backend: name of the backend that trains; empty where it was not determined.
        numbered_by: who numbers the machines; empty when the user does.
        accelerators: how many torch sees on this machine; ``None`` where they were not counted.
    """

    world_size: int
    processes_here: int
    num_machines: int = 1
    machine_rank: int = 0
    rdzv_endpoint: str = "localhost:0"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    selection: Selection = field(default_factory=Selection)
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    fewest_machines: int = 0
    backend: str = ""
    numbered_by: str = ""
    accelerators: int | None = None

    @property
    def machines(self) -> str:
        """The value of ``num_machines``."""
        return f"{self.fewest_machines}:{self.num_machines}" if self.fewest_machines else str(self.num_machines)

    @property
    def on_cpu(self) -> bool:
        """Whether the user chose the CPU."""
        return self.selection.on_cpu


def make_plan(
    resolved: ResolvedConfig, *, elsewhere: bool = False, environ: Mapping[str, str] | None = None
) -> LaunchPlan:
    """Read the launch keys of a configuration and check them against each other, the backend and this machine.

    Args:
        resolved: the configuration.
        elsewhere: the plan is for another machine; this one's devices are not checked.
        environ: the environment; ``None`` = this process's.

    Raises:
        ConfigError: the numbers do not fit, there is no rendezvous address, or accelerators that were chosen are
            not there, too few, or hidden by an exported variable.
        BackendError: the backend is absent, broken, or cannot train over this many processes.
        EnvironmentVariableError: the cluster's variables cannot form a job, see :func:`find_machine`.
    """
    config = resolved.config
    environ = os.environ if environ is None else environ
    machine = None if elsewhere else _machine(resolved, environ)
    if machine is not None:
        config = config.model_copy(update=_settings(machine, resolved))
    fewest, machines = machine_range(config.num_machines)
    if config.machine_rank >= machines:
        raise ConfigError(
            f"machine {config.machine_rank} does not exist among num_machines: {config.num_machines}",
            whose=str(resolved.origin("machine_rank")),
            cure="Write how many there are in num_machines; machines count from 0.",
        )
    asks_machine = not (config.use_cpu or elsewhere)
    kinds = known_kinds(get_registry().devices())
    request = DeviceRequest(cpu=config.use_cpu)
    if config.accelerator_ids is not None:
        origin = str(resolved.origin("accelerator_ids"))
        request = replace(request, ids=tuple(config.accelerator_ids), ids_from=origin)
    if config.device_order is not None:
        request = replace(request, order=config.device_order, order_from=str(resolved.origin("device_order")))
    chosen = bool(request.ids) or request.order is not None
    present = take_inventory(kinds, environ) if asks_machine and chosen else None
    selection = choose(request, environ, present, kinds)
    world, counted = config.num_processes, None
    if machine is not None and (asked := _asked(machine)) is not None:
        _check_agreement(resolved, "num_processes", machines * asked, machine)
        world = machines * asked
    if world is None:
        here, counted = _processes(config.distributed_type, selection, request, asks_machine=asks_machine)
        world = here * machines
    if world % machines:
        raise ConfigError(
            f"num_processes: {world} cannot be shared equally by num_machines: {config.num_machines}",
            cure="num_processes counts the processes of all machines together, when all are there; write a multiple of"
            f" {machines}.",
        )
    if machines > 1 and not config.main_process_ip:
        raise ConfigError(
            f"num_machines is {config.num_machines} but main_process_ip is not set",
            whose="" if machine is None else str(machine),
            cure="Write the address of machine 0 there, the same on every machine.",
        )
    backend = check_backend(config.distributed_type, world)
    _check_mesh(backend, world, resolved)
    if asks_machine:
        looked = _check_devices(world // machines, selection, request, present)
        counted = counted if looked is None else looked
    host = config.main_process_ip or "localhost"
    port = config.main_process_port or (DEFAULT_PORT if machines > 1 else 0)
    return LaunchPlan(
        world_size=world,
        processes_here=world // machines,
        num_machines=machines,
        machine_rank=config.machine_rank,
        rdzv_endpoint=f"{host}:{port}",
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        selection=selection,
        rendezvous=config.rendezvous,
        fewest_machines=0 if fewest == machines else fewest,
        backend=backend,
        numbered_by="" if machine is None or machine.count == 1 else machine.platform,
        accelerators=counted,
    )


def _machine(resolved: ResolvedConfig, environ: Mapping[str, str]) -> Machine | None:
    """This machine as the cluster numbers it, which may not contradict what the user has set."""
    given = {key: getattr(resolved.config, key) if key in resolved.origins else None for key in _NUMBERS}
    fewest, count = (None, None) if given["num_machines"] is None else machine_range(given["num_machines"])
    machine = find_machine(environ, rank=given["machine_rank"], count=count, fewest=fewest)
    if machine is not None:
        _check_agreement(resolved, "num_machines", _range(machine), machine)
        _check_agreement(resolved, "machine_rank", machine.rank, machine)
    return machine


_NUMBERS = ("num_machines", "machine_rank")


def _range(machine: Machine) -> int | str:
    return machine.count if machine.fewest == machine.count else f"{machine.fewest}:{machine.count}"


def _settings(machine: Machine, resolved: ResolvedConfig) -> dict[str, object]:
    """Configuration keys that follow from the cluster's number of this machine; an address of the user's goes first."""
    settings: dict[str, object] = {"num_machines": _range(machine), "machine_rank": machine.rank}
    if machine.count > 1 and resolved.config.main_process_ip is None:
        settings["main_process_ip"] = machine.address or None
    if machine.count > 1 and resolved.config.main_process_port is None:
        settings["main_process_port"] = machine.port
    return settings


def _asked(machine: Machine) -> int | None:
    """Return the processes per machine that the cluster requests; ``None`` if the number of devices decides."""
    if machine.processes == "cpu":
        return available_cores()
    return int(machine.processes) if machine.processes.isdecimal() else None


def _check_agreement(resolved: ResolvedConfig, key: str, theirs: int | str, machine: Machine) -> None:
    """Refuse a key of the user's that contradicts the cluster's variables."""
    ours = getattr(resolved.config, key)
    if key in resolved.origins and ours is not None and str(ours) != str(theirs):
        found = ", ".join(f"{name}={value}" for name, value in machine.seen.items())
        raise ConfigError(
            f"{key} is {ours} ({resolved.origin(key)}), and {machine}, which makes it {theirs}",
            whose=f"seen: {found}",
            cure=f"Leave {key} out: the variables say it. To go by {key} alone, unset them.",
        )


def _processes(
    name: str | None, selection: Selection, request: DeviceRequest, *, asks_machine: bool
) -> tuple[int, int | None]:
    """Default number of processes on one machine, one per usable accelerator, and how many of these torch sees.

    The second is ``None`` where the first follows from something else.
    """
    if name is not None and not get_registry().info(name).capabilities.multi_process:
        return 1, None
    if request.ids is not None:
        return max(1, len(request.ids)), None
    if not asks_machine or selection.on_cpu:
        return 1, None
    count = count_devices()
    return max(1, count), count


def _check_devices(
    processes: int, selection: Selection, request: DeviceRequest, present: Inventory | None
) -> int | None:
    """Refuse more processes than accelerators, where there are any.

    Returns:
        How many torch sees; ``None`` where importing it would only take time.
    """
    if request.ids is not None:
        check_count(processes, request.ids, present)
        return None
    enough = selection.devices is not None and processes <= len(selection.devices)
    if enough or processes == 1 or selection.on_cpu:
        return None
    if count := count_devices():
        check_count(processes, selection.devices or tuple(map(str, range(count))), present)
    return count


def _check_mesh(backend: str, world_size: int, resolved: ResolvedConfig) -> None:
    """Refuse a mesh that the backend has no axis for, or that does not fit the number of processes.

    Raises:
        ConfigError: with the place of each key.
    """
    sizes = resolved.config.mesh.sizes()
    able = get_registry().info(backend).capabilities.mesh_axes
    lacking = [axis for axis, size in sizes.items() if size > 1 and axis not in able]
    if lacking:
        places = ", ".join(str(resolved.origin(f"mesh.{axis}")) for axis in lacking)
        others = [name for name in get_registry().names() if _has_axes(name, lacking)]
        what = "no mesh" if not able else f"the mesh axes {', '.join(sorted(able))}"
        raise ConfigError(
            f"the backend {backend!r} has no mesh axis {', '.join(lacking)}; it has {what}",
            whose=places,
            cure=f"Remove it from `mesh:`{f', or write distributed_type: {others[0]}' if others else ''}.",
        )
    keys = {axis: f"mesh.{axis}" for axis in sizes}
    for axis, key, size in _sizes_of_section(backend, resolved):
        if sizes.setdefault(axis, size) != size:
            raise ConfigError(
                f"{key}: {size} contradicts {keys[axis]}: {sizes[axis]}",
                whose=f"{resolved.origin(keys[axis])}, {resolved.origin(key)}",
                cure="Write it in one place.",
            )
        keys.setdefault(axis, key)
    product = math.prod(sizes.values())
    if world_size > 1 and world_size % product:  # one process may drive several devices as a mesh
        written = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"a mesh of {written} = {product} does not divide {world_size} processes",
            whose=", ".join(str(resolved.origin(key)) for key in keys.values()),
            cure=f"Start a multiple of {product}, or change {', '.join(keys.values())}.",
        )


def _sizes_of_section(backend: str, resolved: ResolvedConfig) -> list[tuple[str, str, int]]:
    """Sizes of mesh axes that a backend's section sets: axis, dotted key, size.

    The section marks such a field by ``json_schema_extra={"mesh_axis": AXIS}``.
    """
    section = resolved.sections.get(backend)
    kind = get_registry().load_section(get_registry().info(backend)) if section else None
    found = []
    for name, declared in ({} if kind is None else kind.model_fields).items():
        extra, size = declared.json_schema_extra, (section or {}).get(name)
        if isinstance(extra, dict) and isinstance(axis := extra.get("mesh_axis"), str) and isinstance(size, int):
            found.append((axis, f"{backend}.{name}", size))
    return found


def _has_axes(name: str, axes: Iterable[str]) -> bool:
    try:
        return set(axes) <= get_registry().info(name).capabilities.mesh_axes
    except BackendError:  # a broken one is no advice
        return False


def check_backend(name: str | None, world_size: int) -> str:
    """Return the backend that will train, after checking that it can. Imports nothing heavy.

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
    """Whether this backend, or for ``None`` any default one, can train over this many processes."""
    try:
        check_backend(name, world_size)
    except (BackendBlockedError, BackendNotFoundError):
        return False
    return True


def describe(plan: LaunchPlan, resolved: ResolvedConfig) -> str:
    """Return one line that describes the launch."""
    processes = f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}{_on_which(plan, resolved)}"
    here = f", {plan.processes_here} of them on machine {plan.machine_rank}" if plan.num_machines > 1 else ""
    here += f" (numbered by {plan.numbered_by})" if plan.numbered_by else ""
    precision = resolved.config.mixed_precision
    precise = "" if precision == "no" else f", {precision}"
    chosen = "".join(f", {remark}" for remark in plan.selection.remarks)
    backend = f"{plan.backend} ({get_registry().owner(plan.backend)})"
    return f"drivetrain {core_version()}: {backend} on {processes}{here}{precise}{chosen}"


def _on_which(plan: LaunchPlan, resolved: ResolvedConfig) -> str:
    """Return where processes run when that is the CPU, chosen or for want of an accelerator; else an empty string."""
    devices = get_registry().info(plan.backend).capabilities.devices
    if devices and "cpu" not in devices:
        return ""
    if resolved.config.use_cpu or plan.on_cpu:
        why = ""
    elif plan.accelerators == 0:
        why = "no accelerator found; "
    else:
        return ""
    cores = available_cores()
    return f" of the CPU ({why}{cores} core{'s' if cores > 1 else ''})"


def count_devices() -> int:
    """The number of accelerators that torch sees on this machine, 0 when there is none. Imports torch."""
    import torch

    kind = torch.accelerator.current_accelerator()
    # By the vendor's module, which for CUDA uses NVML: a process that has started the driver cannot be forked.
    return 0 if kind is None else int(torch.get_device_module(kind).device_count())
