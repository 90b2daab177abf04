"""Defines the options that several subcommands share, and translates them to configuration keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.errors import UsageError

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
"""Flags whose key is in a section."""

ALIASES = {"accelerator_ids": "gpu_ids"}
"""Second names of flags, as other launchers call them."""

SWITCHES = {
    "cpu": ("use_cpu", "Stay on the CPU."),
    "debug": ("debug", "Compare shapes before each collective; show the launcher's log and our frames of errors."),
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
        command = click.option(*_spellings(name), name, metavar="VALUE", help=text)(command)
    return click.option(
        "--config", "--config_file", "config_file", metavar="FILE", help="A YAML file; `drivetrain config` writes one."
    )(command)


def _spellings(name: str) -> list[str]:
    """Return a flag as it may be typed: its own name, then that of other launchers."""
    return [f"--{each}" for each in (name, ALIASES.get(name)) if each]


def check_installed(name: str, what: str) -> None:
    """Refuse what another distribution does, ``drivetrain-NAME``, where it is not installed.

    Raises:
        UsageError: with the command that installs it.
    """
    if find_spec(f"drivetrain_{name}") is None:
        from drivetrain.registry import pip_line

        raise UsageError(f"{what} needs drivetrain-{name}, which is not installed", cure=f"Run: {pip_line(name)}")


def chosen_file(config_file: str | None) -> tuple[str | None, str]:
    """Return the configuration file that a command reads, and a line that names it if the user did not.

    In this order: the one that was named, by ``--config`` or ``DRIVETRAIN_CONFIG_FILE``; ``drivetrain.yaml`` in this
    folder; the user's own, which ``drivetrain config --user`` writes; Accelerate's default file. The first that exists
    is read, and the others are not.
    """
    if config_file is not None or os.environ.get("DRIVETRAIN_CONFIG_FILE"):
        return config_file, ""
    for path in (Path(DEFAULT_FILE), users_file(), *_of_accelerate()):
        if path.is_file():
            return str(path), f"drivetrain: configuration {path} (none was named; `--config FILE` names one)"
    return None, ""


DEFAULT_FILE = "drivetrain.yaml"
"""File in the current folder that ``drivetrain config`` writes, and that is read if none is named."""


def users_file() -> Path:
    """The configuration of all of a user's runs that name none."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "drivetrain" / DEFAULT_FILE


def _of_accelerate() -> list[Path]:
    """Accelerate's own default files, in its order."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return [Path(home).expanduser() / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json")]


def resolve(
    config_file: str | None,
    settings: Sequence[str],
    flags: dict[str, Any],
    chosen: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Load the configuration from file, environment and these flags.

    Args:
        config_file: as ``--config`` names it.
        settings: ``KEY=VALUE``, of ``--set``.
        flags: by name.
        chosen: what a planner has chosen, which overrides all of it.

    Raises:
        ConfigError, BackendError: see :func:`drivetrain.config.load_config`.
        click.UsageError: a ``--set`` without ``=``.
    """
    from drivetrain.config import load_config

    overrides: dict[str, Any] = {}
    named: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--set takes KEY=VALUE, not {setting!r}")
        overrides[key.strip()] = value
        named[key.strip()] = f"--set {key.strip()}"
    for name in FLAGS:
        if flags.get(name) is not None:
            overrides[KEYS.get(name, name)] = flags[name]
            named[KEYS.get(name, name)] = " / ".join(_spellings(name))
    if overrides.get("accelerator_ids") == "":
        overrides["accelerator_ids"] = []  # elsewhere an empty flag means "not given"; here it is a choice
    for name, (key, _) in SWITCHES.items():
        if flags.get(name):
            overrides[key], named[key] = True, f"--{name}"
    return load_config(config_file, overrides=overrides | dict(chosen or {}), flags=named)
