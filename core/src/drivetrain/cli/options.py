"""Options that several subcommands share, and their translation to configuration keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drivetrain.config import ResolvedConfig

FLAGS = {
    "distributed_type": "The backend that trains, by name or alias.",
    "num_processes": "Processes over all machines, when all are there.",
    "num_machines": "Machines in the job; 1:4 goes on with any number of them from 1 to 4.",
    "machine_rank": "Index of this machine, from 0.",
    "main_process_ip": "Address of machine 0.",
    "main_process_port": "Port on machine 0.",
    "rdzv_backend": "c10d or static, accepted either way: machines are numbered by machine_rank.",
    "accelerator_ids": "Accelerators of this machine, in order: 0,2 or UUIDs; all; '' for the CPU.",
    "device_order": "Which accelerator is number 0: pci_bus_id or fastest_first.",
    "max_restarts": "How often failed workers are started again.",
    "mixed_precision": "no, bf16 or fp16.",
    "gradient_accumulation_steps": "Micro-batches between two optimizer steps.",
    "local_ranks_filter": "Local ranks whose output is shown: 0,1 or all; rank 0 of the job if not given.",
    "log_dir": "Folder that gets one file for each rank and stream.",
    "tee": "Streams shown with the rank in front, and filed with log_dir: 1 stdout, 2 stderr, 3 both; or 0:3,1:1.",
    "redirects": "Streams that go to log_dir and are not shown; numbers as for tee.",
    "role": "Word before the rank where lines have it in front.",
}
"""Flags with a value, each named as the configuration key that it sets, or as in :data:`KEYS`."""

KEYS = {name: f"output.{name}" for name in ("local_ranks_filter", "log_dir", "tee", "redirects", "role")}
"""Flags whose key stands in a section."""

ALIASES = {"accelerator_ids": "gpu_ids"}
"""Second names of flags, as other launchers call them."""

SWITCHES = {
    "cpu": ("use_cpu", "Stay on the CPU."),
    "debug": ("debug", "Compare shapes over the ranks before each collective, and show the launcher's own log."),
}
"""Flags without a value: the key that each sets to true."""


normalise = methodcaller("replace", "-", "_")
"""``--num-processes`` is ``--num_processes``."""


def configuration_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config``, every flag above, and ``--set``."""
    command = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key: --set mesh.tp=2")(
        command
    )
    for name, (_, text) in reversed(SWITCHES.items()):
        command = click.option(f"--{name}", is_flag=True, default=None, help=text)(command)
    for name, text in reversed(FLAGS.items()):
        names = [f"--{each}" for each in (name, ALIASES.get(name)) if each]
        command = click.option(*names, name, metavar="VALUE", help=text)(command)
    return click.option(
        "--config", "--config_file", "config_file", metavar="FILE", help="A YAML file; `drivetrain config` writes one."
    )(command)


def resolve(config_file: str | None, settings: Sequence[str], flags: dict[str, Any]) -> ResolvedConfig:
    """Load the configuration from file, environment and these flags.

    Raises:
        ConfigError, BackendError: see :func:`drivetrain.config.load_config`.
        click.UsageError: a ``--set`` without ``=``.
    """
    from drivetrain.config import load_config

    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--set takes KEY=VALUE, not {setting!r}")
        overrides[key.strip()] = value
    overrides |= {KEYS.get(name, name): flags[name] for name in FLAGS if flags.get(name) is not None}
    if overrides.get("accelerator_ids") == "":
        overrides["accelerator_ids"] = []  # elsewhere an empty flag means "not given"; here it is a choice
    overrides |= {key: True for name, (key, _) in SWITCHES.items() if flags.get(name)}
    return load_config(config_file, overrides=overrides)
