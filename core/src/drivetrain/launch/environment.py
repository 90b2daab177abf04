"""Reads this process's ranks from a launcher's environment variables, and sets those of our own workers.

``torchrun``'s variables are the most common: our launcher, Ray and Kubernetes set them too, and so do users by hand.
``mpirun`` and ``srun`` have names of their own. A plain ``python script.py`` has none. Incomplete or contradictory
variables raise, since a process with wrong ranks would silently train on its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drivetrain.launch.machines import (
    Machine,
    Reading,
    Seen,
    are,
    first_host,
    read_machine,
    read_port,
    refuse,
    to_number,
)
from drivetrain.topology import ProcessInfo

# ---- temporary variables ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set variables inside of the block; afterwards each is what it was before.

    Args:
        variables: by name, which is written in upper case; values become text.
    """
    given = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all variables inside of the block; restore them afterwards, whatever the block has set."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- Slurm's compressed lists ----------------------------------------------------------------------------------------


def tasks_per_node(text: str) -> list[int] | None:
    """Slurm's ``4(x2),3`` as ``[4, 4, 3]``; ``None`` when the text is a plain number or no such list."""
    if text.isdecimal() or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return None
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


# ---- variables of launchers ------------------------------------------------------------------------------------------

CONFIG = "DRIVETRAIN_CONFIG"
"""The resolved configuration, as JSON: how the launcher hands it to its workers, all in one value."""

LAUNCHER = "DRIVETRAIN_INTERNAL_LAUNCHER"
"""Set by our launcher, so that :attr:`drivetrain.topology.ProcessInfo.launcher` can name it."""

PREDICTION = "DRIVETRAIN_INTERNAL_PREDICTION"
"""Variable with a planner's prediction as JSON, set under ``plan: {check: true}``."""

RECORD = "DRIVETRAIN_INTERNAL_RECORD"
"""Variable with the folder of a record and its number of steps, as JSON, set by ``drivetrain compare``."""


@dataclass(frozen=True)
class Names:
    """The variables by which one family of launchers numbers processes. Of several names the first that is set counts.

    Args:
        launcher: as people call it.
        rank, world, local, here, node, nodes: the variables of :class:`drivetrain.topology.ProcessInfo`'s numbers.
        address: how the machine of rank 0 is found.
        source: where the launcher's own code or manual sets them.
    """

    launcher: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local: tuple[str, ...]
    here: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: tuple[Reading, ...] = ()
    source: str = ""

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """All of them, in the order in which a message shows them."""
        return (*self.rank, *self.world, *self.local, *self.here, *self.node, *self.nodes)


def _line(path: str) -> str | None:
    """The first line of a file; ``None`` when there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError), Path(path).open(encoding="utf-8") as file:
        return file.readline().strip() or None
    return None


def _word(number: int) -> Callable[[str], str | None]:
    """Takes the word with this index, of hosts with a number of slots behind each."""
    return lambda hosts: next(iter(hosts.split()[number : number + 1]), None)


_SLURMS_HOSTS = tuple(
    Reading((name,), first_host) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
)
_HOSTS = (
    *_SLURMS_HOSTS,
    Reading(("PBS_NODEFILE",), _line),
    Reading(("LSB_MCPU_HOSTS",), _word(0)),
    Reading(("AZ_BATCH_MASTER_NODE",), lambda endpoint: endpoint.partition(":")[0]),
)
"""Variables in which schedulers list the machines of an allocation, on the first of which ``mpirun`` starts rank 0."""

TORCHRUN = Names(
    "environment",
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second of each is deepspeed's
    ("GROUP_RANK", "CROSS_RANK", "NODE_RANK"),  # the third is Ray's and Azure ML's
    ("GROUP_WORLD_SIZE", "CROSS_SIZE", "AZUREML_NODE_COUNT"),
    source="torch.distributed.run; Ray Train, Azure ML: how-to-train-distributed-gpu",
)
OTHERS = (
    Names(
        "jsrun",  # before Open MPI, whose variables jsrun sets, too
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        address=(Reading(("LSB_MCPU_HOSTS",), _word(2)),),  # the first is the launch node, which runs no task
        source="IBM Job Step Manager; openpmix/prrte test programs; Lightning's LSFEnvironment",
    ),
    Names(
        "horovodrun",
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        ("HOROVOD_CROSS_RANK",),
        ("HOROVOD_CROSS_SIZE",),
        address=(Reading(("HOROVOD_GLOO_RENDEZVOUS_ADDR",)),),
        source="horovod/horovod horovod/runner/gloo_run.py",
    ),
    Names(
        "mpirun",  # Open MPI
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        address=_HOSTS,
        source="Open MPI: environment variables of mpirun",
    ),
    Names(
        "mpirun",  # MVAPICH
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        address=_HOSTS,
        source="MVAPICH2 user guide",
    ),
    Names(
        "srun",
        ("SLURM_PROCID",),
        # Of the step, not of the allocation: a batch script sees the allocation's tasks and is one process.
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES",),
        address=_SLURMS_HOSTS,
        source="Slurm: output environment variables of srun",
    ),
    Names(
        "flux",
        ("FLUX_TASK_RANK",),
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        nodes=("FLUX_JOB_NNODES",),
        source="flux-framework/flux-core src/shell/task.c",
    ),
    # Last, since srun and flux set these too.
    Names(
        "mpirun",  # MPICH, Intel MPI, PALS
        ("PMI_RANK", "PALS_RANKID"),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PALS_NODEID",),
        address=_HOSTS,
        source="MPICH's Hydra; HPE Cray PALS as in flux-core src/shell/plugins/pals.c; ALCF user guides",
    ),
)

Jobs = list[tuple[Names, tuple[int, int]]]
"""Launchers, each with this process's rank and the world."""

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""The variables by which torchrun places a process."""

_ELASTIC = "TORCHELASTIC_RUN_ID"
_THREADS = "OMP_NUM_THREADS"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORT = 29500
"""Default rendezvous port, that of torch."""

_PORTS = range(20000, 30000)
"""Rendezvous ports of a cluster's job if none is configured: below the ephemeral ports of systems."""


def read_process_info(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Return this process's ranks from a launcher's variables. Not collective; reads only the environment.

    ``RANK`` and ``WORLD_SIZE`` belong together. ``LOCAL_RANK`` may be missing when the world is 1; the size of the
    machine's part may be missing when there is one machine (``MASTER_ADDR`` is this host, or the group world is 1).
    A launcher of processes that was itself started by ``srun`` or ``mpirun``, one on each machine, counts alone.
    Some of torchrun's names in a job of theirs, as batch scripts export them, have to say the same. Where a cluster has
    started one process on each machine, and numbers machines (:mod:`drivetrain.launch.machines`), this is that one.

    Args:
        environ: the environment; ``None`` = this process's.

    Returns:
        ``ProcessInfo()`` for a plain ``python script.py``.

    Raises:
        EnvironmentVariableError: variables are missing, are no numbers, or contradict each other, or two launchers
            set variables at once; lists them.
    """
    environ = os.environ if environ is None else environ
    every = _seen(environ)
    seen, theirs = every.get(TORCHRUN, {}), _jobs(every, environ)
    said: dict[str, str] = {name: seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in seen}
    started = bool(said) and not seen.items() <= {"WORLD_SIZE": "1"}.items()
    if started and theirs and _ELASTIC not in environ and LAUNCHER not in environ:
        _refuse_otherwise(said, theirs, every)
        started = {"RANK", "WORLD_SIZE"} <= said.keys()
    numbered = bool(theirs) or _is_worker(environ)
    if not numbered and "LOCAL_RANK" not in said and (machine := read_machine(environ)) is not None:
        return _only_process(machine)
    if started:
        process = _process_info(TORCHRUN, seen, environ)
        if not numbered:
            _refuse_other_machine(process, seen, environ)
        return process
    _refuse_half(every)
    _refuse_two(theirs, every)
    return _process_info(theirs[0][0], every[theirs[0][0]], environ) if theirs else ProcessInfo()


def _is_worker(environ: Mapping[str, str]) -> bool:
    """Whether ``drivetrain launch`` or ``torchrun`` started this process."""
    return bool(environ.get(_ELASTIC) or environ.get(LAUNCHER))


def _only_process(machine: Machine) -> ProcessInfo:
    """The ranks of a process that was started on a machine without a launcher, and is the only one there."""
    here, why = _processes_wanted(machine)
    if here > 1:
        raise refuse(
            f"{why}, and without a launcher there is one",
            machine.seen,
            cure="Start the script with `drivetrain launch script.py`, which reads these variables, or with `torchrun`;"
            " CUDA_VISIBLE_DEVICES=0 shows one accelerator.",
        )
    if machine.count == 1:
        return ProcessInfo()
    if machine.fewest != machine.count:
        raise refuse(
            f"{machine.platform} says {machine.fewest} to {machine.count} machines, which a launcher has to count",
            machine.seen,
            cure="Start it with `drivetrain launch script.py`, which reads these variables, or with `torchrun`.",
        )
    return ProcessInfo(machine.rank, machine.count, 0, 1, machine.rank, machine.count, machine.platform)


def _processes_wanted(machine: Machine) -> tuple[int, str]:
    """Return the number of processes of this machine, and where it comes from."""
    if machine.processes.isdecimal():
        return int(machine.processes), f"PET_NPROC_PER_NODE asks for {machine.processes} processes on this machine"
    if machine.processes == "cpu":
        cores = available_cores()
        return cores, f"PET_NPROC_PER_NODE asks for one process on each of {cores} cores"
    if machine.count == 1 and machine.processes != "gpu":
        return 1, ""  # as on any machine with several accelerators
    from drivetrain.launch.plan import count_devices  # imports torch

    devices = count_devices()
    return devices, f"{machine}, this one has {devices} accelerators, a process for each is wanted"


def _refuse_other_machine(process: ProcessInfo, seen: Seen, environ: Mapping[str, str]) -> None:
    """Refuse torchrun's names, exported by hand, where they contradict the cluster's number of this machine."""
    theirs = {name: value for name, value in environ.items() if name not in TORCHRUN.variables}
    machine = read_machine(theirs, partly=True)
    if machine is not None and (machine.rank, machine.count) != (process.node_rank, process.num_nodes):
        raise refuse(
            f"{machine}, and {' and '.join(seen)} say machine {process.node_rank} of {process.num_nodes}",
            {**machine.seen, **seen},
        )


def _seen(environ: Mapping[str, str]) -> dict[Names, Seen]:
    """The set variables of each launcher."""
    every = {
        names: {name: environ[name] for name in names.variables if environ.get(name, "") != ""}
        for names in (TORCHRUN, *OTHERS)
    }
    return {names: seen for names, seen in every.items() if seen}


def _jobs(every: Mapping[Names, Seen], environ: Mapping[str, str]) -> Jobs:
    """Launchers other than torchrun that started several processes, without an ``srun`` of another one's daemons."""
    jobs = [(names, job) for names in OTHERS if names in every and (job := _job(names, every[names])) is not None]
    if not jobs:
        return jobs
    # mpirun and Ray have srun start one daemon on each machine, whose processes inherit srun's variables.
    one_each = environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES")
    worlds = [world for _, (_, world) in jobs]
    if own := _job(TORCHRUN, every.get(TORCHRUN, {})):
        worlds.append(own[1])
    return [job for job in jobs if not (one_each and job[0].launcher == "srun" and job[1][1] < max(worlds))]


def _job(names: Names, seen: Seen) -> tuple[int, int] | None:
    """Rank and world when this launcher started more than one process; ``None`` when it did not."""
    found = _numbers(names, seen, ("rank", "world")) if _missing(names, seen) == [] else {"world": 1}
    return (found["rank"], found["world"]) if found["world"] > 1 else None


def _missing(names: Names, seen: Seen) -> list[str]:
    """Those of rank and world that are not set, by the launcher's name for them."""
    return [each[0] for each in (names.rank, names.world) if seen.keys().isdisjoint(each)]


def _numbers(names: Names, seen: Seen, wanted: Iterable[str]) -> dict[str, int]:
    """The numbers of those fields of ``names`` that are set."""
    set_by = {each: next((name for name in getattr(names, each) if name in seen), None) for each in wanted}
    return {each: to_number(name, seen[name], seen) for each, name in set_by.items() if name is not None}


def find_machine(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    count: int | None = None,
    fewest: int | None = None,
) -> Machine | None:
    """The number of this machine for ``drivetrain launch``, as a cluster or another launcher gives it.

    A launcher that is the only process of ``srun``, ``mpirun`` and so on on its machine is that machine. So is one that
    has ``RANK`` and ``WORLD_SIZE`` without ``LOCAL_RANK``, as containers have them.

    Args:
        environ: the environment; ``None`` = this process's.
        rank, count, fewest: ``machine_rank`` and ``num_machines``, where the user has set them.

    Returns:
        ``None`` where nothing numbers machines, or only the user does.

    Raises:
        EnvironmentVariableError: variables are missing, contradict each other, or say that this is one of several
            processes on its machine.
    """
    environ = os.environ if environ is None else environ
    if _is_worker(environ):
        refuse_nested(count or 1, environ)
        return None
    every = _seen(environ)
    seen = every.get(TORCHRUN, {})
    theirs = _jobs(every, environ)
    if not theirs and "LOCAL_RANK" not in seen:
        if count == 1:  # the user says that this machine is alone, which only whole environments contradict
            machine = read_machine(environ, partly=True)
        else:
            machine = read_machine(environ, rank=rank, count=count, fewest=fewest)
        return machine or _machine_by_hand(seen, environ, count)
    refuse_nested(count or 1, environ, only_here=True)
    process = read_process_info(environ)
    if process.world_size == 1:
        return None
    address, port = meeting_point(environ) or (environ["MASTER_ADDR"], _port(environ))
    seen = every[theirs[0][0]] if theirs else seen
    size = process.world_size
    return Machine(process.rank, size, fewest or size, address, port, "", process.launcher, seen)


def _machine_by_hand(seen: Seen, environ: Mapping[str, str], count: int | None) -> Machine | None:
    """The machine that ``RANK`` and ``WORLD_SIZE`` number outside of a cluster that is known."""
    said = {name: seen[name] for name in ("RANK", "WORLD_SIZE") if name in seen}
    world = to_number("WORLD_SIZE", said.get("WORLD_SIZE", "1"), said)
    if not said or said.items() <= {"WORLD_SIZE": "1"}.items():
        return None
    if count is not None and count > 1 and world % count == 0:
        return None  # the user numbers the machines, and the variables count processes
    if len(said) == 1:
        missing = ({"RANK", "WORLD_SIZE"} - said.keys()).pop()
        raise refuse(
            f"{missing} is not set",
            said,
            cure="Number the machines by --num_machines and --machine_rank, or unset these.",
        )
    if world == 1:
        return None
    process = _process_info(TORCHRUN, {**said, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, environ)
    _check_master(environ)
    said |= {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    return Machine(process.rank, world, world, environ["MASTER_ADDR"], _port(environ), "", "the environment", said)


def refuse_nested(num_machines: int, environ: Mapping[str, str] | None = None, *, only_here: bool = False) -> None:
    """Refuse to launch in each process of another launcher: every one of them would be a run of its own.

    One launcher on each machine, started by ``srun`` or ``mpirun``, is allowed.

    Args:
        num_machines: of the launch.
        environ: the environment; ``None`` = this process's.
        only_here: allow it also where this process is the only one on its machine.

    Raises:
        EnvironmentVariableError: this process is one of several, and not one of ``num_machines``.
    """
    environ = os.environ if environ is None else environ
    every = _seen(environ)
    jobs = _jobs(every, environ)
    if own := _job(TORCHRUN, every.get(TORCHRUN, {})):
        jobs = [*jobs, (TORCHRUN, own)]
    for names, (_, world) in jobs:
        seen = every[names]
        # Kubernetes and Slurm's batch shell export a world without a rank on the machine.
        if world == num_machines or seen.keys().isdisjoint(names.local):
            continue
        if not (only_here and _process_info(names, seen, environ).local_world_size == 1):
            raise refuse(
                f"this launcher is itself one of {world} processes, and each of them would start a run of its own",
                seen,
                cure="Start the script itself there, or one launcher on each machine with --num_machines; or unset"
                " what an earlier run left in this shell.",
            )


def _refuse_otherwise(said: Seen, theirs: Jobs, every: Mapping[Names, Seen]) -> None:
    """Raise if torchrun's variables are set and differ from those of ``srun`` or ``mpirun``."""
    # All of them together may hide devices, and number this process 0 on its machine.
    checked = ("RANK", "WORLD_SIZE") if {"RANK", "WORLD_SIZE"} <= said.keys() else tuple(said)
    for names, (rank, world) in theirs:
        seen = {**said, **every[names]}
        local = next((name for name in names.local if name in seen), "LOCAL_RANK")
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": to_number(local, seen.get(local, "0"), seen)}
        if wrong := [name for name in checked if to_number(name, said[name], seen) != numbers[name]]:
            says = f"{' and '.join(wrong)} {'says' if len(wrong) == 1 else 'say'} otherwise"
            raise refuse(f"{names.launcher} says rank {rank} of {world}, {says}", seen)


def _refuse_half(every: Mapping[Names, Seen]) -> None:
    """Refuse a rank without a world size, or the reverse. Slurm's batch shell, too, has a rank, which is 0."""
    for names, seen in every.items():
        missing = [] if names is TORCHRUN else _missing(names, seen)
        if len(missing) == 1 and not (names.launcher == "srun" and seen.get("SLURM_PROCID", "0") == "0"):
            raise refuse(f"{missing[0]} is not set", seen)


def _refuse_two(theirs: Jobs, every: Mapping[Names, Seen]) -> None:
    """Refuse two launchers that disagree, which are nested; two that agree are the same job (srun with MPI)."""
    if len({numbers for _, numbers in theirs}) > 1:
        who = " and ".join(f"{names.launcher} ({names.rank[0]})" for names, _ in theirs)
        seen = {name: value for names, _ in theirs for name, value in every[names].items()}
        raise refuse(f"the variables of {who} contradict each other", seen)


def _process_info(names: Names, seen: Seen, environ: Mapping[str, str]) -> ProcessInfo:
    """One launcher's numbers, completed and checked."""
    if missing := _missing(names, seen):
        raise refuse(f"{are(missing)} not set", seen)
    numbers = _numbers(names, seen, ("rank", "world", "local", "node", "nodes"))
    rank, world = numbers["rank"], numbers["world"]
    local = numbers.get("local", 0 if world == 1 else None)
    if local is None:
        raise refuse(
            f"{names.local[0]} is not set, so that the device of this process is unknown",
            seen,
            cure="Start the script with `drivetrain launch` or `torchrun`; where each machine runs one process, "
            "`export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1` says so.",
        )
    here = _size_here(names, environ, numbers, seen)
    nodes = numbers.get("nodes", max(1, world // here) if here else 1)
    if not 0 <= rank < world:
        raise refuse(f"rank {rank} does not exist in a world of {world}", seen)
    if not 0 <= local < here:
        raise refuse(f"local rank {local} does not exist on a machine with {here}", seen)
    if here > world:
        raise refuse(f"this machine has {here} processes, the whole job {world}", seen)
    if local > rank:
        raise refuse(f"local rank {local} is larger than rank {rank}", seen)
    if world < here + nodes - 1 or (nodes == 1 and here != world):
        raise refuse(f"{world} processes cannot be {here} on this one of {nodes} machine{'s' * (nodes != 1)}", seen)
    node = numbers.get("node", rank // here)
    if not 0 <= node < max(nodes, 1):
        raise refuse(f"machine {node} does not exist among {nodes}", seen)
    launcher = names.launcher
    if names is TORCHRUN:
        launcher = environ.get(LAUNCHER) or ("torchrun" if _ELASTIC in environ else launcher)
    return ProcessInfo(rank, world, local, here, node, nodes, launcher)


def _equal_shares(numbers: Mapping[str, int]) -> int:
    """Processes on each machine where all have as many, numbered machine after machine; 0 when that is not certain."""
    rank, world, local = numbers["rank"], numbers["world"], numbers.get("local", 0)
    nodes, node = numbers.get("nodes", 0), numbers.get("node")
    here = 0
    if nodes > 0 and world % nodes == 0:
        here = world // nodes
    elif nodes <= 0 and node and (rank - local) % node == 0:
        here = (rank - local) // node
    fits = here > local and (rank - local) % here == 0 and world % here == 0
    return here if fits and node in (None, (rank - local) // here) else 0


def _size_here(names: Names, environ: Mapping[str, str], numbers: Mapping[str, int], seen: Seen) -> int:
    """Processes on this machine: as set, else all of them when there is one machine."""
    variable = next((name for name in names.here if name in seen), None)
    if variable is not None:
        counts = tasks_per_node(seen[variable])
        if counts is None:
            return to_number(variable, seen[variable], seen)
        if len(counts) == numbers.get("nodes") and sum(counts) != numbers["world"]:
            raise refuse(f"{variable} counts {sum(counts)} processes, and the world has {numbers['world']}", seen)
        return counts[numbers.get("node", 0) % len(counts)]
    if derived := _equal_shares(numbers):
        return derived
    one_machine = numbers.get("nodes", 0) == 1 or environ.get("MASTER_ADDR", "localhost") in _LOOPBACK
    if not (numbers["world"] == 1 or one_machine):
        raise refuse(f"{names.here[0]} is not set, and MASTER_ADDR does not say that there is one machine", seen)
    return numbers["world"]


def meeting_point(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Rendezvous address of ``srun`` or ``mpirun`` processes where the environment has none; ``None`` where it has one.

    ``MASTER_ADDR`` and ``MASTER_PORT`` go first. A scheduler lists the machines of its allocation, on the first of
    which rank 0 runs, and the number of the job makes a port; processes on one machine use that machine. Clusters that
    number machines say where the first is.

    Raises:
        EnvironmentVariableError: processes are on several machines without a rendezvous address, or rank 0 is not on
            the machine where the others look for it.
    """
    environ = os.environ if environ is None else environ
    said = {name for name, value in environ.items() if value}
    if {"RANK", "WORLD_SIZE"} <= said or {"MASTER_ADDR", "MASTER_PORT"} <= said:
        _check_master(environ)
        return None
    every = _seen(environ)
    jobs = _jobs(every, environ)
    job = ":".join(environ[name] for name in _JOB_NAMES if name in environ)
    port = _port(environ) or (_PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT)
    machine = read_machine(environ, partly=bool(jobs))
    if not jobs:
        if machine is None or machine.count == 1:
            return None
        if not machine.address:
            raise refuse(f"{machine}, and MASTER_ADDR, the address of machine 0, is not set", machine.seen)
        return machine.address, DEFAULT_PORT if machine.port is None else machine.port
    names = jobs[0][0]
    process = _process_info(names, every[names], environ)
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], port
    if process.local_world_size == process.world_size:
        return "127.0.0.1", port
    ways = (way.read(environ) for launcher, _ in jobs for way in launcher.address)
    host, seen = next(filter(None, ways), ("", {}))
    if not host and machine is not None and machine.address:
        host, seen = machine.address, dict(machine.seen)
    if not host:
        raise refuse(
            "its processes are on several machines, and MASTER_ADDR, the address of machine 0, is not set",
            every[names],
            _ADDRESS,
        )
    from drivetrain.launch.coordinator import is_here

    if process.rank == 0 and is_here(host) is False:
        raise refuse(
            f"the other ranks expect rank 0 on {host}, and it runs on {socket.gethostname()}",
            {**every[names], **seen},
            _ADDRESS,
        )
    return host, port


_ADDRESS = (
    "Give all of them the address of the machine of rank 0 and a free port: mpirun -x MASTER_ADDR=node0"
    " -x MASTER_PORT=29500 ... (MPICH: -genv MASTER_ADDR node0; Flux: flux run --env=MASTER_ADDR=node0)."
)


def _check_master(environ: Mapping[str, str]) -> None:
    """Check the common rendezvous variables, which several processes need."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if environ.get("WORLD_SIZE", "1").strip() != "1" and missing:
        raise refuse(
            f"{are(missing)} not set, so that the processes do not know the address of rank 0",
            {name: environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if environ.get(name)},
        )
    _port(environ)


def _port(environ: Mapping[str, str]) -> int | None:
    """``MASTER_PORT``; ``None`` when it is not set."""
    text = environ.get("MASTER_PORT")
    if not text:
        return None
    return read_port("MASTER_PORT", text, {"MASTER_PORT": text})


_JOB_NAMES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "PALS_APID"),
    *("LSB_JOBID", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)
"""Variables that differ between jobs on one machine and agree within one."""


def worker_environment(config: str, processes_here: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what our launcher adds to the environment of every worker.

    Args:
        config: the resolved configuration as JSON.
        processes_here: number of workers on this machine; they share its cores.
        environ: the launcher's own environment; ``None`` = this process's. An ``OMP_NUM_THREADS`` in it is kept.
    """
    environ = os.environ if environ is None else environ
    added = {CONFIG: config, LAUNCHER: "drivetrain"}
    if not environ.get(_THREADS):
        added[_THREADS] = str(max(1, available_cores() // processes_here))
    return added


def available_cores() -> int:
    """Return the number of cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
