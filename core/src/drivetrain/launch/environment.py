"""The environment contract, both ways: what any launcher tells a process, and what ours tells its workers.

``torchrun``'s variables are the common tongue: our launcher sets them too, and so do Ray, Kubernetes and whoever starts
processes by hand. ``mpirun`` and ``srun`` have names of their own. A plain ``python script.py`` has none.
Anything in between is refused, since a process that guesses wrong trains alone and looks healthy.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain.errors import EnvironmentVariableError
from drivetrain.topology import ProcessInfo

# ---- Environment variables for a while, and back again: what scripts and tests of scripts wrap around a call

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
    """No variables at all inside of the block; afterwards those of before, whatever the block has set."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- Slurm's compressed lists, of hosts and of tasks, as its variables hold them. No torch

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


# ---- The environment contract, both ways: what any launcher tells a process, and what ours tells its workers

CONFIG = "DRIVETRAIN_CONFIG"
"""The resolved configuration, as JSON: how the launcher hands it to its workers, all in one value."""

LAUNCHER = "DRIVETRAIN_INTERNAL_LAUNCHER"
"""Set by our launcher, so that :attr:`drivetrain.topology.ProcessInfo.launcher` can name it."""


@dataclass(frozen=True)
class Tongue:
    """The names under which one family of launchers places a process. Of several names the first that is set counts.

    Args:
        launcher: as people call it.
        rank, world, local, here, node, nodes: the variables of :class:`drivetrain.topology.ProcessInfo`'s numbers.
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

Jobs = list[tuple[Tongue, tuple[int, int]]]
"""Launchers, each with this process's rank and the world."""

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
    """Return where a launcher put this process. Not collective; reads the environment and nothing else.

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
            speak at once; lists what was seen.
    """
    environ = os.environ if environ is None else environ
    theirs = _jobs(environ)
    seen = _seen(TORCHRUN, environ)
    said: dict[str, str] = {name: seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in seen}
    started = bool(said) and not seen.items() <= {"WORLD_SIZE": "1"}.items()
    if started and theirs and _ELASTIC not in environ and LAUNCHER not in environ:
        _refuse_otherwise(said, theirs, environ)
        started = {"RANK", "WORLD_SIZE"} <= said.keys()
    if started:
        return _place(TORCHRUN, environ)
    _refuse_half(environ)
    _refuse_two(theirs, environ)
    return _place(theirs[0][0], environ) if theirs else ProcessInfo()


def _jobs(environ: Mapping[str, str]) -> Jobs:
    """Launchers other than torchrun that started several processes, without an ``srun`` of another one's daemons."""
    jobs = [(tongue, numbers) for tongue in OTHERS if (numbers := _job_of(tongue, environ)) is not None]
    # mpirun and Ray have srun start one daemon on each machine; what srun told that, its processes inherit.
    one_each = environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES")
    worlds = [world for _, (_, world) in jobs]
    if own := _job_of(TORCHRUN, environ):
        worlds.append(own[1])
    return [job for job in jobs if not (one_each and job[0].launcher == "srun" and job[1][1] < max(worlds))]


def _job_of(tongue: Tongue, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and world when this launcher started more than one process; ``None`` when it is not there."""
    seen = _seen(tongue, environ)
    rank, world = (_first(names, seen) for names in (tongue.rank, tongue.world))
    if rank is None or world is None:
        return None
    numbers = _number(rank, seen[rank], seen), _number(world, seen[world], seen)
    return numbers if numbers[1] > 1 else None


def refuse_nested(num_machines: int, environ: Mapping[str, str] | None = None) -> None:
    """Refuse to launch in each process of another launcher: every one of them would be a run of its own.

    One launcher on each machine, started by ``srun`` or ``mpirun``, is as it should be.

    Raises:
        EnvironmentVariableError: this process is one of several, and not one of ``num_machines``.
    """
    environ = os.environ if environ is None else environ
    for tongue in (TORCHRUN, *OTHERS):
        job, seen = _job_of(tongue, environ), _seen(tongue, environ)
        # Kubernetes and Slurm's batch shell export a world without placing this process in it.
        if job is not None and job[1] != num_machines and _first(tongue.local, seen) is not None:
            raise _refuse(
                f"this launcher is itself one of {job[1]} processes, and each of them would start a run of its own",
                seen,
                cure="Start the script itself there, or one launcher on each machine with --num_machines; or unset"
                " what an earlier run left in this shell.",
            )


def _refuse_otherwise(said: Mapping[str, str], theirs: Jobs, environ: Mapping[str, str]) -> None:
    """Refuse torchrun's names where they are set and differ from what ``srun`` or ``mpirun`` says."""
    # All of them together may hide devices, and number this process 0 on its machine.
    names = ("RANK", "WORLD_SIZE") if {"RANK", "WORLD_SIZE"} <= said.keys() else tuple(said)
    for tongue, (rank, world) in theirs:
        seen = {**said, **_seen(tongue, environ)}
        local = _first(tongue.local, seen) or "LOCAL_RANK"
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": _number(local, seen.get(local, "0"), seen)}
        if wrong := [name for name in names if _number(name, said[name], seen) != numbers[name]]:
            says = f"{' and '.join(wrong)} {'says' if len(wrong) == 1 else 'say'} otherwise"
            raise _refuse(f"{tongue.launcher} says rank {rank} of {world}, {says}", seen)


def _refuse_half(environ: Mapping[str, str]) -> None:
    """Refuse one alone of a rank and a world. Slurm's batch shell, too, has a rank, which is 0, and is no job."""
    for tongue in OTHERS:
        seen = _seen(tongue, environ)
        missing = [names[0] for names in (tongue.rank, tongue.world) if _first(names, seen) is None]
        if len(missing) == 1 and (tongue.launcher == "mpirun" or seen.get("SLURM_PROCID", "0") != "0"):
            raise _refuse(f"{missing[0]} is not set", seen)


def _refuse_two(theirs: Jobs, environ: Mapping[str, str]) -> None:
    """Two launchers that agree are one, seen twice (srun with MPI); two that do not were started inside each other."""
    if len({numbers for _, numbers in theirs}) > 1:
        names = " and ".join(f"{tongue.launcher} ({tongue.rank[0]})" for tongue, _ in theirs)
        seen = {name: value for tongue, _ in theirs for name, value in _seen(tongue, environ).items()}
        raise _refuse(f"{names} both speak, and contradict each other", seen)


def _place(tongue: Tongue, environ: Mapping[str, str]) -> ProcessInfo:
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
        raise _refuse(
            f"{tongue.local[0]} is not set, so that the device of this process is unknown",
            seen,
            cure="Start the script with `drivetrain launch` or `torchrun`; where each machine runs one process, "
            "`export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1` says so.",
        )
    here = _size_here(tongue, environ, number, seen)
    nodes = number.get("nodes", max(1, world // here) if here else 1)
    _check_sizes(rank, world, local, here, seen)
    if world < here + nodes - 1 or (nodes == 1 and here != world):
        raise _refuse(f"{world} processes cannot be {here} on this one of {nodes} machine{'s' * (nodes != 1)}", seen)
    node = number.get("node", rank // here)
    if not 0 <= node < max(nodes, 1):
        raise _refuse(f"machine {node} does not exist among {nodes}", seen)
    return ProcessInfo(rank, world, local, here, node, nodes, _launcher(tongue, environ))


def _size_here(tongue: Tongue, environ: Mapping[str, str], number: Mapping[str, int], seen: Mapping[str, str]) -> int:
    """Processes on this machine: as told, else all of them when there is one machine."""
    variable = _first(tongue.here, seen)
    if variable is not None:
        counts = tasks_per_node(seen[variable])
        if counts is None:
            return _number(variable, seen[variable], seen)
        if len(counts) == number.get("nodes") and sum(counts) != number["world"]:
            raise _refuse(f"{variable} counts {sum(counts)} processes, and the world has {number['world']}", seen)
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
    said = {name for name, value in environ.items() if value}
    if {"RANK", "WORLD_SIZE"} <= said or {"MASTER_ADDR", "MASTER_PORT"} <= said:
        _check_master(environ)
        return None
    jobs = _jobs(environ)
    if not jobs:
        return None
    tongue = jobs[0][0]
    place = _place(tongue, environ)
    job = ":".join(environ[name] for name in _JOB_NAMES if name in environ)
    port = _port(environ) or (_PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT)
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


def _check_master(environ: Mapping[str, str]) -> None:
    """The common names of where processes meet, which several processes need."""
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

