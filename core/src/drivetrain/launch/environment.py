"""Reads this process's ranks from a launcher's environment variables, and sets those of our own workers.

``torchrun``'s variables are the most common: our launcher, Ray and Kubernetes set them too, and so do users by hand.
``mpirun`` and ``srun`` have names of their own. A plain ``python script.py`` has none. Incomplete or contradictory
variables raise, since a process that guesses wrong would silently train alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from drivetrain.errors import EnvironmentVariableError
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


def first_host(listed: str) -> str:
    """First name of Slurm's compressed list: ``node[03-05,9],gpu1`` begins with ``node03``.

    Source: the hostlist expressions of ``scontrol show hostnames``.
    """
    before, bracket, after = listed.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, rest = after.partition("]")
    return before + re.split("[-,]", inside)[0] + first_host(rest)


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


@dataclass(frozen=True)
class Names:
    """The variables by which one family of launchers numbers processes. Of several names the first that is set counts.

    Args:
        launcher: as people call it.
        rank, world, local, here, node, nodes: the variables of :class:`drivetrain.topology.ProcessInfo`'s numbers.
        variables: all of them, in the order in which a message shows them.
    """

    launcher: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local: tuple[str, ...]
    here: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    variables: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        every = (*self.rank, *self.world, *self.local, *self.here, *self.node, *self.nodes)
        object.__setattr__(self, "variables", every)


TORCHRUN = Names(
    "environment",
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second of each is deepspeed's
    ("GROUP_RANK", "CROSS_RANK", "NODE_RANK"),  # the third is Ray's
    ("GROUP_WORLD_SIZE", "CROSS_SIZE"),
)
OTHERS = (
    Names(
        "mpirun",  # Open MPI
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Names(
        "mpirun",  # MVAPICH
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
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
    ),
    # Last, since srun sets these too where its MPI support is on.
    Names("mpirun", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),  # MPICH, Intel MPI
)

Jobs = list[tuple[Names, tuple[int, int]]]
"""Launchers, each with this process's rank and the world."""

Seen = Mapping[str, str]
"""Variables of one launcher that are set, by name."""

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""The variables by which torchrun places a process."""

_ELASTIC = "TORCHELASTIC_RUN_ID"
_THREADS = "OMP_NUM_THREADS"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORT = 29500
"""Where machines meet when no port is given: torch's own default."""

_PORTS = range(20000, 30000)
"""Where tasks of a cluster's job meet when nobody named a port: below the range from which systems lend ports."""


def read_process_info(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Return this process's ranks from a launcher's variables. Not collective; reads only the environment.

    ``RANK`` and ``WORLD_SIZE`` belong together. ``LOCAL_RANK`` may be missing when the world is 1; the size of the
    machine's part may be missing when there is one machine (``MASTER_ADDR`` is this host, or the group world is 1).
    A launcher of processes that was itself started by ``srun`` or ``mpirun``, one on each machine, counts alone.
    Some of torchrun's names in a job of theirs, as batch scripts export them, have to say the same.

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
    if started:
        return _process_info(TORCHRUN, seen, environ)
    _refuse_half(every)
    _refuse_two(theirs, every)
    return _process_info(theirs[0][0], every[theirs[0][0]], environ) if theirs else ProcessInfo()


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
    return {each: _number(name, seen[name], seen) for each, name in set_by.items() if name is not None}


def refuse_nested(num_machines: int, environ: Mapping[str, str] | None = None) -> None:
    """Refuse to launch in each process of another launcher: every one of them would be a run of its own.

    One launcher on each machine, started by ``srun`` or ``mpirun``, is allowed.

    Raises:
        EnvironmentVariableError: this process is one of several, and not one of ``num_machines``.
    """
    environ = os.environ if environ is None else environ
    for names, seen in _seen(environ).items():
        job = _job(names, seen)
        # Kubernetes and Slurm's batch shell export a world without a rank on the machine.
        if job is not None and job[1] != num_machines and not seen.keys().isdisjoint(names.local):
            raise _refuse(
                f"this launcher is itself one of {job[1]} processes, and each of them would start a run of its own",
                seen,
                cure="Start the script itself there, or one launcher on each machine with --num_machines; or unset"
                " what an earlier run left in this shell.",
            )


def _refuse_otherwise(said: Seen, theirs: Jobs, every: Mapping[Names, Seen]) -> None:
    """Refuse torchrun's names where they are set and differ from what ``srun`` or ``mpirun`` says."""
    # All of them together may hide devices, and number this process 0 on its machine.
    checked = ("RANK", "WORLD_SIZE") if {"RANK", "WORLD_SIZE"} <= said.keys() else tuple(said)
    for names, (rank, world) in theirs:
        seen = {**said, **every[names]}
        local = next((name for name in names.local if name in seen), "LOCAL_RANK")
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": _number(local, seen.get(local, "0"), seen)}
        if wrong := [name for name in checked if _number(name, said[name], seen) != numbers[name]]:
            says = f"{' and '.join(wrong)} {'says' if len(wrong) == 1 else 'say'} otherwise"
            raise _refuse(f"{names.launcher} says rank {rank} of {world}, {says}", seen)


def _refuse_half(every: Mapping[Names, Seen]) -> None:
    """Refuse a rank without a world size, or the reverse. Slurm's batch shell, too, has a rank, which is 0."""
    for names, seen in every.items():
        missing = [] if names is TORCHRUN else _missing(names, seen)
        if len(missing) == 1 and (names.launcher == "mpirun" or seen.get("SLURM_PROCID", "0") != "0"):
            raise _refuse(f"{missing[0]} is not set", seen)


def _refuse_two(theirs: Jobs, every: Mapping[Names, Seen]) -> None:
    """Refuse two launchers that disagree, which are nested; two that agree are the same job (srun with MPI)."""
    if len({numbers for _, numbers in theirs}) > 1:
        who = " and ".join(f"{names.launcher} ({names.rank[0]})" for names, _ in theirs)
        seen = {name: value for names, _ in theirs for name, value in every[names].items()}
        raise _refuse(f"{who} both speak, and contradict each other", seen)


def _process_info(names: Names, seen: Seen, environ: Mapping[str, str]) -> ProcessInfo:
    """One launcher's numbers, completed and checked."""
    if missing := _missing(names, seen):
        raise _refuse(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set", seen)
    number = _numbers(names, seen, ("rank", "world", "local", "node", "nodes"))
    rank, world = number["rank"], number["world"]
    local = number.get("local", 0 if world == 1 else None)
    if local is None:
        raise _refuse(
            f"{names.local[0]} is not set, so that the device of this process is unknown",
            seen,
            cure="Start the script with `drivetrain launch` or `torchrun`; where each machine runs one process, "
            "`export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1` says so.",
        )
    here = _size_here(names, environ, number, seen)
    nodes = number.get("nodes", max(1, world // here) if here else 1)
    if not 0 <= rank < world:
        raise _refuse(f"rank {rank} does not exist in a world of {world}", seen)
    if not 0 <= local < here:
        raise _refuse(f"local rank {local} does not exist on a machine with {here}", seen)
    if here > world:
        raise _refuse(f"this machine has {here} processes, the whole job {world}", seen)
    if local > rank:
        raise _refuse(f"local rank {local} is larger than rank {rank}", seen)
    if world < here + nodes - 1 or (nodes == 1 and here != world):
        raise _refuse(f"{world} processes cannot be {here} on this one of {nodes} machine{'s' * (nodes != 1)}", seen)
    node = number.get("node", rank // here)
    if not 0 <= node < max(nodes, 1):
        raise _refuse(f"machine {node} does not exist among {nodes}", seen)
    launcher = names.launcher
    if names is TORCHRUN:
        launcher = environ.get(LAUNCHER) or ("torchrun" if _ELASTIC in environ else launcher)
    return ProcessInfo(rank, world, local, here, node, nodes, launcher)


def _size_here(names: Names, environ: Mapping[str, str], number: Mapping[str, int], seen: Seen) -> int:
    """Processes on this machine: as set, else all of them when there is one machine."""
    variable = next((name for name in names.here if name in seen), None)
    if variable is not None:
        counts = tasks_per_node(seen[variable])
        if counts is None:
            return _number(variable, seen[variable], seen)
        if len(counts) == number.get("nodes") and sum(counts) != number["world"]:
            raise _refuse(f"{variable} counts {sum(counts)} processes, and the world has {number['world']}", seen)
        return counts[number.get("node", 0) % len(counts)]
    one_machine = number.get("nodes", 0) == 1 or environ.get("MASTER_ADDR", "localhost") in _LOOPBACK
    if not (number["world"] == 1 or one_machine):
        raise _refuse(f"{names.here[0]} is not set, and MASTER_ADDR does not say that there is one machine", seen)
    return number["world"]


def meeting_point(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Rendezvous address of ``srun`` or ``mpirun`` processes where the environment has none; ``None`` where it has one.

    ``MASTER_ADDR`` and ``MASTER_PORT`` go first. A step of Slurm lists its machines, and its job number makes a port;
    processes of ``mpirun`` on one machine use that machine, with a port derived from their job's identifiers.

    Raises:
        EnvironmentVariableError: ``mpirun`` runs over several machines without a rendezvous address.
    """
    environ = os.environ if environ is None else environ
    said = {name for name, value in environ.items() if value}
    if {"RANK", "WORLD_SIZE"} <= said or {"MASTER_ADDR", "MASTER_PORT"} <= said:
        _check_master(environ)
        return None
    every = _seen(environ)
    jobs = _jobs(every, environ)
    if not jobs:
        return None
    names = jobs[0][0]
    process = _process_info(names, every[names], environ)
    job = ":".join(environ[name] for name in _JOB_NAMES if name in environ)
    port = _port(environ) or (_PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT)
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], port
    if process.local_world_size == process.world_size:
        return "127.0.0.1", port
    if names.launcher == "srun" and listed:
        return first_host(listed), port
    raise _refuse(
        "its processes are on several machines, and MASTER_ADDR does not say where they meet",
        every[names],
        cure="Give all of them the first machine's address and a free port: "
        "mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500 ... (MPICH: -genv MASTER_ADDR node0).",
    )


def _check_master(environ: Mapping[str, str]) -> None:
    """Check the common rendezvous variables, which several processes need."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if environ.get("WORLD_SIZE", "1").strip() != "1" and missing:
        verb = "is" if len(missing) == 1 else "are"
        raise _refuse(
            f"{' and '.join(missing)} {verb} not set, so that nobody knows where to meet",
            {name: environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if environ.get(name)},
        )
    _port(environ)


def _port(environ: Mapping[str, str]) -> int | None:
    """``MASTER_PORT``; ``None`` when it is not set."""
    text = environ.get("MASTER_PORT")
    if not text:
        return None
    port = _number("MASTER_PORT", text, {"MASTER_PORT": text})
    if not 0 <= port < 1 << 16:
        raise _refuse(f"MASTER_PORT is {port}, and ports end at 65535", {"MASTER_PORT": text})
    return port


_JOB_NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
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


def _number(name: str, text: str, seen: Mapping[str, str]) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise _refuse(f"{name} is {text!r}, not a number", seen)
    return int(text)


def _refuse(
    what: str,
    seen: Mapping[str, str],
    cure: str = "Start the script with `drivetrain launch` or `torchrun`, or unset these variables to run one process.",
) -> EnvironmentVariableError:
    found = ", ".join(f"{name}={value}" for name, value in seen.items())
    return EnvironmentVariableError(
        f"the environment announces a distributed job that cannot be formed: {what}",
        whose=f"seen: {found}",
        cure=cure,
    )

