"""Reads the number of machines of a job and the rank of this one from a cluster's environment variables.

Clusters that start one container on each machine number the machines, not processes: Kubernetes' operators, SageMaker
and Vertex AI do. Each is a row of :data:`PLATFORMS`. ``drivetrain launch`` takes its machine's number from there, and a
script that was started without a launcher is rank N of the world where there is one process on each machine. Launchers
that number processes are in :mod:`drivetrain.launch.environment`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from drivetrain.errors import EnvironmentVariableError

Seen = Mapping[str, str]
"""Variables that are set, by name. An empty variable counts as not set."""

# ---- Parsing of values -----------------------------------------------------------------------------------------------


def first_host(listed: str) -> str:
    """First name of Slurm's compressed list: ``node[03-05,9],gpu1`` begins with ``node03``.

    Source: the hostlist expressions of ``scontrol show hostnames``.
    """
    before, bracket, after = listed.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, rest = after.partition("]")
    return before + re.split("[-,]", inside)[0] + first_host(rest)


def _host(endpoint: str) -> str:
    """``node0`` of ``node0:29400``."""
    return _split(endpoint)[0]


def _port(endpoint: str) -> str | None:
    """``29400`` of ``node0:29400``."""
    return _split(endpoint)[1] or None


def _split(endpoint: str) -> tuple[str, str]:
    host, colon, port = endpoint.rpartition(":")
    return (host.strip("[]"), port) if colon and port.isdecimal() and "]" not in port else (endpoint.strip("[]"), "")


def _first_of_list(text: str) -> str:
    return text.partition(",")[0]


def _fewest(machines: str) -> str:
    """``1`` of ``1:4``."""
    return machines.partition(":")[0]


def _most(machines: str) -> str:
    """``4`` of ``1:4``, and of ``4``."""
    return machines.rpartition(":")[2]


def _names(listed: str) -> list[str]:
    """SageMaker's JSON list of hosts."""
    names = json.loads(listed)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of names")
    return names


def _index(listed: str, name: str) -> str:
    return str(_names(listed).index(name))


_WORKERS = ("workerpool0", "workerpool1")
"""Vertex AI's pools that train: the primary replica and the workers. Others are parameter servers and evaluators."""


def _replicas(spec: str) -> list[str]:
    cluster = json.loads(spec)["cluster"]
    return [host for pool in _WORKERS for host in cluster.get(pool, ())]


def _replica(spec: str) -> str:
    task, cluster = json.loads(spec)["task"], json.loads(spec)["cluster"]
    before = _WORKERS[: _WORKERS.index(task["type"])]
    return str(sum(len(cluster.get(pool, ())) for pool in before) + int(task["index"]))


# ---- The table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Rule that reads a value from variables.

    Args:
        variables: all of which have to be set. One ``*`` in a name stands for any text; exactly one has to match.
        parse: makes the value of those of the variables; ``None`` takes the one as it is.
    """

    variables: tuple[str, ...]
    parse: Callable[..., str | None] | None = None

    def read(self, environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
        """The value and the variables that it is from; ``None`` when one of them is not set.

        Raises:
            EnvironmentVariableError: a variable has no such value.
        """
        seen: dict[str, str] = {}
        for variable in self.variables:
            fitting = [name for name in matching(variable, environ) if environ[name] != ""]
            if len(fitting) != 1:
                return None
            seen[fitting[0]] = environ[fitting[0]]
        if self.parse is None:
            return next(iter(seen.values())).strip(), seen
        try:
            value = self.parse(*seen.values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refuse(f"{are(seen)} not what this cluster sets", seen) from None
        return None if value is None else (value, seen)


def matching(variable: str, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that match a name, which may have one ``*``."""
    if "*" not in variable:
        return [variable] if variable in environ else []
    return sorted(name for name in environ if fnmatchcase(name, variable))


@dataclass(frozen=True)
class Platform:
    """The variables by which one kind of cluster numbers machines. Of several readings the first that is there counts.

    Args:
        name: as people call it.
        signs: one of these is set where this cluster started the process.
        rank: index of this machine.
        count: number of machines; of an elastic job the most.
        fewest: of an elastic job, the fewest.
        address, port: where machine 0 is reached.
        processes: how many on each machine: a number, or ``auto``, ``gpu`` or ``cpu`` as in ``torchrun``.
        defaults: values by field for where no variable has one.
        within: a variable that has to be set, too, for the signs to mean this cluster.
        cure: what to do where half of the variables are there.
        source: where the cluster's own code or manual sets them.
    """

    name: str
    signs: tuple[str, ...]
    rank: tuple[Reading, ...]
    count: tuple[Reading, ...]
    address: tuple[Reading, ...]
    port: tuple[Reading, ...] = ()
    fewest: tuple[Reading, ...] = ()
    processes: tuple[Reading, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    within: str = ""
    cure: str = ""
    source: str = ""

    def variables(self) -> list[str]:
        """All names that are read, in the order in which a message shows them."""
        fields = (self.rank, self.count, self.address, self.port, self.fewest, self.processes)
        return list(dict.fromkeys([name for each in fields for way in each for name in way.variables]))


def _each(*names: str) -> tuple[Reading, ...]:
    """One variable, which is the value; several are alternatives."""
    return tuple(Reading((name,)) for name in names)


_TORCHS_ADDRESS, _TORCHS_PORT = _each("MASTER_ADDR"), _each("MASTER_PORT")

PLATFORMS = (
    Platform(
        "Kubeflow (PET_*)",
        signs=("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"),
        rank=_each("PET_NODE_RANK"),
        count=(Reading(("PET_NNODES",), _most),),
        address=(*_each("PET_MASTER_ADDR"), Reading(("PET_RDZV_ENDPOINT",), _host), *_TORCHS_ADDRESS),
        port=(*_each("PET_MASTER_PORT"), Reading(("PET_RDZV_ENDPOINT",), _port), *_TORCHS_PORT),
        fewest=(Reading(("PET_NNODES",), _fewest),),
        processes=_each("PET_NPROC_PER_NODE"),
        defaults={"count": "1"},  # torchrun's
        cure="An elastic PyTorchJob does not number its pods: start the script with `torchrun` there, or give"
        " `drivetrain launch` a --machine_rank, such as the number at the end of the pod's name: ${HOSTNAME##*-}.",
        source="kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go;"
        " kubeflow/training-operator pkg/controller.v1/pytorch/envvar.go, elastic.go; torch.distributed.run",
    ),
    Platform(
        "LeaderWorkerSet",
        signs=("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
        rank=_each("LWS_WORKER_INDEX"),
        count=_each("LWS_GROUP_SIZE"),
        address=_each("LWS_LEADER_ADDRESS"),
        port=_TORCHS_PORT,
        source="kubernetes-sigs/lws pkg/utils/pod/pod_utils.go",
    ),
    Platform(
        "Volcano",
        signs=("VC_TASK_INDEX", "VK_TASK_INDEX"),
        # Two tasks, master and worker, have an index each.
        rank=(*_each("RANK"), Reading(("VC_TASK_INDEX", "VC_*_HOSTS"), lambda index, _: index)),
        count=_each("WORLD_SIZE", "VC_*_NUM"),
        address=(*_TORCHS_ADDRESS, Reading(("VC_*_HOSTS",), _first_of_list)),
        port=_TORCHS_PORT,
        cure="Add `pytorch: []` to the plugins of a job with the tasks master and worker, or `svc: []` to those of a"
        " job with one task.",
        source="volcano-sh/volcano pkg/controllers/job/plugins/: env, svc, distributed-framework/pytorch",
    ),
    Platform(
        "Vertex AI",
        signs=("CLUSTER_SPEC",),
        rank=(Reading(("CLUSTER_SPEC",), _replica),),
        count=(Reading(("CLUSTER_SPEC",), lambda spec: str(len(_replicas(spec)))),),
        address=(Reading(("CLUSTER_SPEC",), lambda spec: _host(_replicas(spec)[0])), *_TORCHS_ADDRESS),
        port=(*_TORCHS_PORT, Reading(("CLUSTER_SPEC",), lambda spec: _port(_replicas(spec)[0]))),
        source="https://cloud.google.com/vertex-ai/docs/training/distributed-training",
    ),
    Platform(
        "SageMaker",
        signs=("SM_HOSTS", "SM_CURRENT_HOST"),
        rank=(Reading(("SM_HOSTS", "SM_CURRENT_HOST"), _index),),
        count=(Reading(("SM_HOSTS",), lambda hosts: str(len(_names(hosts)))),),
        address=(Reading(("SM_HOSTS",), lambda hosts: _names(hosts)[0]),),
        port=_TORCHS_PORT,
        source="aws/sagemaker-training-toolkit src/sagemaker_training/params.py, torch_distributed.py",
    ),
    Platform(
        "indexed Job, JobSet",
        signs=("JOB_COMPLETION_INDEX",),
        rank=_each("RANK", "JOB_COMPLETION_INDEX"),
        count=_each("WORLD_SIZE"),
        address=_TORCHS_ADDRESS,
        port=_TORCHS_PORT,
        cure="For one run over all pods, set WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the manifest. For a run of its"
        " own in each, unset the index: env -u JOB_COMPLETION_INDEX python script.py",
        source="kubernetes/kubernetes pkg/controller/job/indexed_job_utils.go; kubernetes-sigs/jobset examples/pytorch",
    ),
    Platform(
        "Kubernetes (PyTorchJob, Volcano)",
        signs=("RANK", "WORLD_SIZE"),
        rank=_each("RANK"),
        count=_each("WORLD_SIZE"),
        address=_TORCHS_ADDRESS,
        port=_TORCHS_PORT,
        within="KUBERNETES_SERVICE_HOST",
        source="kubeflow/training-operator pkg/controller.v1/pytorch/envvar.go",
    ),
)
"""Clusters that number machines. A later row may complete an earlier one; they must not contradict."""


# ---- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """This machine among those of a job, as a cluster's variables number them.

    Args:
        rank: index of this machine, from 0.
        count: number of machines; of an elastic job the most.
        fewest: of an elastic job, the fewest; the same as ``count`` in others.
        address: where machine 0 is reached; empty when nothing says it.
        port: on machine 0; ``None`` when nothing says it.
        processes: how many on each machine: a number, ``auto``, ``gpu`` or ``cpu``; empty when nothing says it.
        platform: who numbers it.
        seen: the variables from which this was read.
    """

    rank: int
    count: int
    fewest: int
    address: str = ""
    port: int | None = None
    processes: str = ""
    platform: str = ""
    seen: Seen = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.platform} says machine {self.rank} of {self.count}"


def read_machine(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    count: int | None = None,
    fewest: int | None = None,
    partly: bool = False,
) -> Machine | None:
    """This machine's number, where the cluster has started a process on each machine. Reads only the environment.

    Args:
        environ: the environment.
        rank, count, fewest: what the user said about this machine, which completes variables that are not all there.
        partly: return ``None``, instead of raising, where variables are missing.

    Returns:
        ``None`` where no variable says that there is such a cluster.

    Raises:
        EnvironmentVariableError: variables are missing, have impossible values, or contradict each other; lists them.
    """
    said = {"rank": rank, "count": count, "fewest": count if fewest is None else fewest}
    given = {name: str(value) for name, value in said.items() if value is not None}
    found: list[Machine] = []
    halves: list[tuple[Platform, list[str], dict[str, str], Seen]] = []
    for platform in PLATFORMS:
        signs = {name: environ[name] for name in platform.signs if environ.get(name, "") != ""}
        if not signs or (platform.within and not environ.get(platform.within)):
            continue
        values, read = _values(platform, environ)
        seen = signs | read
        if missing := _missing(platform, values, {}):
            halves.append((platform, missing, values, seen))
        else:
            found.append(_machine(platform, values, seen))
    if not found:
        for platform, missing, partial, variables in halves:
            if not _missing(platform, partial, given):
                return _machine(platform, given | partial, variables)
            if not partly:
                raise refuse(
                    f"{platform.name} started this process, and {are(missing)} not set",
                    variables,
                    cure=platform.cure,
                )
        return None
    for other in found[1:]:
        if not _agree(found[0], other):
            raise refuse(f"{found[0]}, {other}", {**found[0].seen, **other.seen})
    return found[0]


def _values(platform: Platform, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the value of each field of a platform, and the variables that it comes from."""
    values: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name in ("rank", "count", "fewest", "address", "port", "processes"):
        ways: tuple[Reading, ...] = getattr(platform, name)
        if (got := next(filter(None, (way.read(environ) for way in ways)), None)) is not None:
            values[name] = got[0]
            seen |= got[1]
    return values, seen


def _missing(platform: Platform, values: dict[str, str], given: dict[str, str]) -> list[str]:
    """The variables without which a machine has no number, by their first names."""
    values = platform.defaults | given | values
    alone = {"rank"} if values.get("count") == "1" else set()
    fields = {"rank": platform.rank, "count": platform.count}
    lacking = [ways for name, ways in fields.items() if name not in values.keys() | alone]
    return list(dict.fromkeys(" or ".join(way.variables[0] for way in ways) for ways in lacking))


def _machine(platform: Platform, values: Mapping[str, str], seen: Seen) -> Machine:
    """The values as numbers, checked against each other."""
    values = {"rank": "0", **platform.defaults, **values}  # the rank is missing only where the count is 1
    numbers = {name: to_number(name_of(platform, name, seen), values[name], seen) for name in ("rank", "count")}
    rank, count = numbers["rank"], numbers["count"]
    fewest = to_number(name_of(platform, "count", seen), values.get("fewest", values["count"]), seen)
    if not 1 <= fewest <= count:
        raise refuse(f"{platform.name} says {fewest} to {count} machines", seen)
    if not 0 <= rank < count:
        raise refuse(f"machine {rank} does not exist among {count}", seen, cure=platform.cure)
    port = read_port(name_of(platform, "port", seen), values["port"], seen) if "port" in values else None
    processes = values.get("processes", "")
    if processes not in ("", "auto", "gpu", "cpu") and to_number("PET_NPROC_PER_NODE", processes, seen) < 1:
        raise refuse(f"PET_NPROC_PER_NODE asks for {processes} processes", seen)
    return Machine(rank, count, fewest, values.get("address", ""), port, processes, platform.name, seen)


def name_of(platform: Platform, name: str, seen: Seen) -> str:
    """The variables that a field was read from."""
    ways: tuple[Reading, ...] = getattr(platform, name)
    for way in ways:
        if found := [each for variable in way.variables for each in matching(variable, seen)]:
            return " and ".join(found)
    return name


def _agree(one: Machine, other: Machine) -> bool:
    """Whether two numberings are the same. ``WORLD_SIZE`` may count the processes of all machines."""
    processes = int(one.processes) if one.processes.isdecimal() else 1
    return one.rank == other.rank and other.count in (one.count, one.count * processes)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def to_number(name: str, text: str, seen: Seen) -> int:
    """Convert the text of a variable to an integer. Raises :class:`EnvironmentVariableError` for anything else."""
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise refuse(f"{name} is {text!r}, not a number", seen)
    return int(text)


def read_port(name: str, text: str, seen: Seen) -> int:
    """The text of a variable as a port. Raises :class:`EnvironmentVariableError` for anything else."""
    port = to_number(name, text, seen)
    if not 0 <= port < 1 << 16:
        raise refuse(f"{name} is {port}, and ports end at 65535", seen)
    return port


def refuse(what: str, seen: Seen, cure: str = "") -> EnvironmentVariableError:
    """The error of variables from which no job can be formed; lists them."""
    found = ", ".join(f"{name}={value}" for name, value in seen.items())
    return EnvironmentVariableError(
        f"the environment announces a distributed job that cannot be formed: {what}",
        whose=f"seen: {found}",
        cure=cure
        or "Start the script with `drivetrain launch` or `torchrun`, or unset these variables to run one process.",
    )


def are(names: Collection[str]) -> str:
    """``A is``, or ``A and B are``."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
