"""The environment contract, both ways: what a launcher tells a process, and what ours tells its workers.

``torchrun``'s variables are the common tongue: our launcher sets them too, and whoever starts processes by hand or by
a cluster's job system can. A plain ``python script.py`` has none of them. Anything in between is refused, since a
process that guesses wrong trains alone and looks healthy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain.errors import EnvironmentVariableError
from drivetrain.topology import Place

CONFIG = "DRIVETRAIN_CONFIG"
"""The resolved configuration, as JSON: how the launcher hands it to its workers, all in one value."""

LAUNCHER = "DRIVETRAIN_INTERNAL_LAUNCHER"
"""Set by our launcher, so that :attr:`drivetrain.topology.Place.launcher` can name it."""

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""The variables that place a process."""

_ELASTIC = "TORCHELASTIC_RUN_ID"
_THREADS = "OMP_NUM_THREADS"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def read_place(environ: Mapping[str, str] | None = None) -> Place:
    """Return where a launcher put this process. Not collective; reads the environment and nothing else.

    ``RANK`` and ``WORLD_SIZE`` belong together. ``LOCAL_RANK`` may be missing when the world is 1; the size of the
    machine's part may be missing when there is one machine (``MASTER_ADDR`` is this host, or the group world is 1).

    Args:
        environ: the environment; ``None`` = this process's.

    Returns:
        ``Place()`` for a plain ``python script.py``.

    Raises:
        EnvironmentVariableError: variables are missing, are no numbers, or contradict each other; lists what was seen.
    """
    environ = os.environ if environ is None else environ
    seen = {name: environ[name] for name in RANKS if environ.get(name, "") != ""}
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(seen) or seen.items() <= {"WORLD_SIZE": "1"}.items():
        return Place()
    number = {name: _number(name, text, seen) for name, text in seen.items()}
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in number]
    if missing:
        raise _refuse(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set", seen)
    rank, world = number["RANK"], number["WORLD_SIZE"]
    if world == 1:
        number = {"LOCAL_RANK": 0, **number}
    if "LOCAL_RANK" not in number:
        raise _refuse("LOCAL_RANK is not set, so that the device of this process is unknown", seen)
    local = number["LOCAL_RANK"]
    here = number.get("LOCAL_WORLD_SIZE")
    if here is None:
        one_machine = number.get("GROUP_WORLD_SIZE", 0) == 1 or environ.get("MASTER_ADDR", "localhost") in _LOOPBACK
        if not (world == 1 or one_machine):
            raise _refuse("LOCAL_WORLD_SIZE is not set, and MASTER_ADDR does not say that there is one machine", seen)
        here = world
    nodes = number.get("GROUP_WORLD_SIZE", max(1, world // here) if here else 1)
    _check_sizes(rank, world, local, here, seen)
    if not 0 <= number.get("GROUP_RANK", 0) < nodes:
        raise _refuse(f"machine {number['GROUP_RANK']} does not exist among {nodes}", seen)
    return Place(
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=here,
        node_rank=number.get("GROUP_RANK", rank // here),
        num_nodes=nodes,
        launcher=environ.get(LAUNCHER) or ("torchrun" if _ELASTIC in environ else "environment"),
    )


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


def _refuse(what: str, seen: Mapping[str, str]) -> EnvironmentVariableError:
    found = ", ".join(f"{name}={value}" for name, value in seen.items())
    return EnvironmentVariableError(
        f"the environment announces a distributed job that cannot be formed: {what}",
        whose=f"seen: {found}",
        cure="Start the script with `drivetrain launch` or `torchrun`, or unset these variables to run one process.",
    )
