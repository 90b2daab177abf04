"""The environment contract, both ways: what any launcher tells a process, and what ours tells its workers.

``torchrun``'s variables are the common tongue: our launcher sets them too, and so do Ray, Kubernetes and whoever starts
processes by hand. ``mpirun`` and ``srun`` have names of their own. A plain ``python script.py`` has none.
Anything in between is refused, since a process that guesses wrong trains alone and looks healthy.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.errors import EnvironmentVariableError
from drivetrain.topology import Place

CONFIG = "DRIVETRAIN_CONFIG"
"""The resolved configuration, as JSON: how the launcher hands it to its workers, all in one value."""

LAUNCHER = "DRIVETRAIN_INTERNAL_LAUNCHER"
"""Set by our launcher, so that :attr:`drivetrain.topology.Place.launcher` can name it."""


@dataclass(frozen=True)
class Tongue:
    """The names under which one family of launchers places a process. Of several names the first that is set counts.

    Args:
        launcher: as people call it.
        rank, world, local, here, node, nodes: the variables of :class:`drivetrain.topology.Place`'s numbers.
    """

    launcher: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local: tuple[str, ...]
    here: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """All names, in the order in which a message shows them."""
        return (*self.rank, *self.world, *self.local, *self.here, *self.node, *self.nodes)


TORCHRUN = Tongue(
    "environment",
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second of each is deepspeed's
    ("GROUP_RANK", "CROSS_RANK", "NODE_RANK"),  # the third is Ray's
    ("GROUP_WORLD_SIZE", "CROSS_SIZE"),
)
OTHERS = (
    Tongue(
        "mpirun",  # Open MPI
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Tongue(
        "mpirun",  # MVAPICH
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Tongue(
        "srun",
        ("SLURM_PROCID",),
        # Of the step, not of the allocation: a batch script sees the allocation's tasks and is one process.
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES",),
    ),
    # Last, since srun speaks this tongue too where its MPI support is on.
    Tongue("mpirun", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),  # MPICH, Intel MPI
)

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""The variables by which torchrun places a process."""

_ELASTIC = "TORCHELASTIC_RUN_ID"
_THREADS = "OMP_NUM_THREADS"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORT = 29500
"""Where machines meet when no port is given: torch's own default."""

_PORTS = range(20000, 30000)
"""Where tasks of a cluster's job meet when nobody named a port: below the range from which systems lend ports."""


def read_place(environ: Mapping[str, str] | None = None) -> Place:
    """Return where a launcher put this process. Not collective; reads the environment and nothing else.

    ``RANK`` and ``WORLD_SIZE`` belong together. ``LOCAL_RANK`` may be missing when the world is 1; the size of the
    machine's part may be missing when there is one machine (``MASTER_ADDR`` is this host, or the group world is 1).
    A launcher of processes that was itself started by ``srun`` or ``mpirun``, one on each machine, counts alone.

    Args:
        environ: the environment; ``None`` = this process's.

    Returns:
        ``Place()`` for a plain ``python script.py``.

    Raises:
        EnvironmentVariableError: variables are missing, are no numbers, or contradict each other, or two launchers
            speak at once; lists what was seen.
    """
    environ = os.environ if environ is None else environ
    theirs = [(tongue, numbers) for tongue in OTHERS if (numbers := _job_of(tongue, environ)) is not None]
    seen = _seen(TORCHRUN, environ)
    started = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(seen) and not seen.items() <= {"WORLD_SIZE": "1"}.items()
    if not started:
        _refuse_two(theirs, environ)
        return _place(theirs[0][0], environ) if theirs else Place()
    place = _place(TORCHRUN, environ)
    if _ELASTIC not in environ and LAUNCHER not in environ:
        for tongue, (rank, world) in theirs:
            # deepspeed and hand-written scripts export torchrun's names in a job of mpirun's or srun's, and agree.
            if (rank, world) != (place.rank, place.world_size):
                both = {**seen, **_seen(tongue, environ)}
                raise _refuse(f"{tongue.launcher} says rank {rank} of {world}, RANK and WORLD_SIZE say otherwise", both)
    return place


def _job_of(tongue: Tongue, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and world when this launcher started more than one process; ``None`` when it is not there."""
    seen = _seen(tongue, environ)
    rank, world = (_first(names, seen) for names in (tongue.rank, tongue.world))
    if rank is None or world is None:
        return None
    numbers = _number(rank, seen[rank], seen), _number(world, seen[world], seen)
    return numbers if numbers[1] > 1 else None


def _refuse_two(theirs: list[tuple[Tongue, tuple[int, int]]], environ: Mapping[str, str]) -> None:
    """Two launchers that agree are one, seen twice (srun with MPI); two that do not were started inside each other."""
    if len({numbers for _, numbers in theirs}) > 1:
        names = " and ".join(tongue.launcher for tongue, _ in theirs)
        seen = {name: value for tongue, _ in theirs for name, value in _seen(tongue, environ).items()}
        raise _refuse(f"{names} both speak, and contradict each other", seen)


def _place(tongue: Tongue, environ: Mapping[str, str]) -> Place:
    """One launcher's numbers, completed and checked."""
    seen = _seen(tongue, environ)
    missing = [names[0] for names in (tongue.rank, tongue.world) if _first(names, seen) is None]
    if missing:
        raise _refuse(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set", seen)
    fields = ("rank", "world", "local", "node", "nodes")
    number: dict[str, int] = {}
    for name in fields:
        variable = _first(getattr(tongue, name), seen)
        if variable is not None:
            number[name] = _number(variable, seen[variable], seen)
    rank, world = number["rank"], number["world"]
    local = number.get("local", 0 if world == 1 else None)
    if local is None:
        raise _refuse(f"{tongue.local[0]} is not set, so that the device of this process is unknown", seen)
    here = _size_here(tongue, environ, number, seen)
    nodes = number.get("nodes", max(1, world // here) if here else 1)
    _check_sizes(rank, world, local, here, seen)
    node = number.get("node", rank // here)
    if not 0 <= node < max(nodes, 1):
        raise _refuse(f"machine {node} does not exist among {nodes}", seen)
    return Place(rank, world, local, here, node, nodes, _launcher(tongue, environ))


def _size_here(
    tongue: Tongue, environ: Mapping[str, str], number: Mapping[str, int], seen: Mapping[str, str]
) -> int:
    """Processes on this machine: as told, else all of them when there is one machine."""
    variable = _first(tongue.here, seen)
    if variable is not None:
        counts = _tasks_per_node(seen[variable])
        if counts is None:
            return _number(variable, seen[variable], seen)
        return counts[number.get("node", 0) % len(counts)]
    one_machine = number.get("nodes", 0) == 1 or environ.get("MASTER_ADDR", "localhost") in _LOOPBACK
    if not (number["world"] == 1 or one_machine):
        raise _refuse(f"{tongue.here[0]} is not set, and MASTER_ADDR does not say that there is one machine", seen)
    return number["world"]


def _launcher(tongue: Tongue, environ: Mapping[str, str]) -> str:
    if tongue is not TORCHRUN:
        return tongue.launcher
    return environ.get(LAUNCHER) or ("torchrun" if _ELASTIC in environ else tongue.launcher)


def meeting_point(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Where the processes of ``srun`` or ``mpirun`` meet, when the environment does not say; ``None`` when it does.

    ``MASTER_ADDR`` and ``MASTER_PORT`` go first. A step of Slurm lists its machines, and its job number makes a port;
    processes of ``mpirun`` on one machine meet there, at a port made from what names their job.

    Raises:
        EnvironmentVariableError: ``mpirun`` runs over several machines, and nobody said where they meet.
    """
    environ = os.environ if environ is None else environ
    if {"RANK", "WORLD_SIZE"} <= environ.keys() or {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    tongue = next((each for each in OTHERS if _job_of(each, environ) is not None), None)
    if tongue is None:
        return None
    place = _place(tongue, environ)
    job = ":".join(environ[name] for name in _JOB_NAMES if name in environ)
    port = int(environ.get("MASTER_PORT") or (_PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT))
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], port
    if place.local_world_size == place.world_size:
        return "127.0.0.1", port
    if tongue.launcher == "srun" and listed:
        return first_host(listed), port
    raise _refuse(
        "its processes are on several machines, and MASTER_ADDR does not say where they meet",
        _seen(tongue, environ),
        cure="Give all of them the first machine's address and a free port: "
        "mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500 ... (MPICH: -genv MASTER_ADDR node0).",
    )


_JOB_NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables that differ between jobs on one machine and agree within one."""


def first_host(listed: str) -> str:
    """First name of Slurm's compressed list: ``node[03-05,9],gpu1`` begins with ``node03``.

    Source: the hostlist expressions of ``scontrol show hostnames``.
    """
    before, bracket, after = listed.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, rest = after.partition("]")
    return before + re.split("[-,]", inside)[0] + first_host(rest)


def _tasks_per_node(text: str) -> list[int] | None:
    """Slurm's ``4(x2),3`` as ``[4, 4, 3]``; ``None`` when the text is a plain number or no such list."""
    if text.isdecimal() or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return None
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def _seen(tongue: Tongue, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in tongue.variables if environ.get(name, "") != ""}


def _first(names: tuple[str, ...], seen: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in seen), None)


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


def _check_sizes(rank: int, world: int, local: int, here: int, seen: Mapping[str, str]) -> None:
    """Refuse ranks and sizes that cannot belong to one job."""
    if not 0 <= rank < world:
        raise _refuse(f"rank {rank} does not exist in a world of {world}", seen)
    if not 0 <= local < here:
        raise _refuse(f"local rank {local} does not exist on a machine with {here}", seen)
    if here > world:
        raise _refuse(f"this machine has {here} processes, the whole job {world}", seen)
    if local > rank:
        raise _refuse(f"local rank {local} is larger than rank {rank}", seen)


def _number(name: str, text: str, seen: Mapping[str, str]) -> int:
    try:
        return int(text)
    except ValueError:
        raise _refuse(f"{name} is {text!r}, not a number", seen) from None


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
