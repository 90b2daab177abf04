"""Suggests what to write instead of an option of another launcher."""

from __future__ import annotations

from drivetrain.config.accelerate_rules import RULES, SECTIONS, Rule
from drivetrain.config.keys import CORE_KEYS
from drivetrain.errors import BackendError
from drivetrain.registry import get_registry

_ALL = "--num_processes, which counts the processes of all machines"
_BY_HAND = "--num_machines and --machine_rank, in one launch on each machine"
INSTEAD = {
    "nproc_per_node": _ALL,
    "num_gpus": _ALL,
    "n": _ALL,
    "np": _ALL,
    "nnodes": "--num_machines",
    "num_nodes": "--num_machines",
    "node_rank": "--machine_rank",
    "master_addr": "--main_process_ip",
    "master_port": "--main_process_port",
    "rdzv_endpoint": "--main_process_ip and --main_process_port",
    "rdzv_conf": "--set rendezvous.timeout_seconds=SECONDS",
    "use_cpu": "--cpu",
    "include": "--gpu_ids 0,2",
    "exclude": "--gpu_ids with those to use",
    "hostfile": _BY_HAND,
    "mpirun_hostfile": _BY_HAND,
    "deepspeed_hostfile": _BY_HAND,
}
"""Suggestions by option, without dashes, of torchrun, deepspeed, mpirun and Accelerate that are no key of a file."""

NEEDLESS = {
    "standalone": "a launch without --num_machines is of this machine alone",
    "rdzv_id": "machines that name the same --main_process_ip and --main_process_port belong together",
    "mps": "the accelerators of this machine are found",
    "start_method": "each process is started anew",
}


def advise(option: str) -> str:
    """A sentence about this option; empty where it is unknown.

    Args:
        option: as typed, ``--multi_gpu``.
    """
    name = option.lstrip("-").replace("-", "_")
    if name in INSTEAD:
        return f"Write {INSTEAD[name]}."
    if name in NEEDLESS:
        return f"Leave it out: {NEEDLESS[name]}."
    if backend := _backend(name):
        return f"Write --distributed_type {backend}."
    if name in CORE_KEYS:
        return f"Write --set {name}=VALUE."
    for section, rules in {"": RULES, **SECTIONS, **get_registry().import_rules()}.items():
        if name in rules:
            return _advise(rules[name], section)
    return ""


def _backend(name: str) -> str:
    """Return the backend that ``use_NAME`` or a bare ``NAME`` selects; also one that could be installed."""
    for word in (name, name.removeprefix("use_")):
        try:
            get_registry().resolve(word)
        except BackendError as error:
            if "pip install" not in error.cure:
                continue
        return word
    return ""


def _advise(rule: Rule, section: str) -> str:
    """The advice of a configuration key's rule, for the option of the same name."""
    if rule.to:
        return f"Write --set {rule.to}=VALUE."
    if rule.why:
        return f"Leave it out: {rule.why}."
    if rule.instead:
        return f"Instead, {rule.instead}."
    return f"It can stand in the configuration file{f', under {section}' if section else ''}."
