"""``drivetrain env``: prints versions, devices and plugins for a bug report. This subcommand may import torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import click

SHOWN_VARIABLES = (
    "DRIVETRAIN_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
)
"""Beginnings of environment variables that change what happens."""

PACKAGES = ("numpy", "pluggy", "pydantic", "safetensors", "click", "tqdm")


@click.command()
def env() -> None:
    """Print versions, devices and plugins for a bug report."""
    for key, value in facts():
        click.echo(f"- {key}: {value}")


def facts() -> Iterator[tuple[str, str]]:
    """Yield the facts about this machine and environment, one line each."""
    import torch

    from drivetrain.backend import CONTRACT
    from drivetrain.launch.coordinator import TOKEN
    from drivetrain.launch.environment import OTHERS, available_cores
    from drivetrain.launch.machines import PLATFORMS
    from drivetrain.registry import core_version, get_registry

    yield "drivetrain", f"{core_version()}, backend contract {CONTRACT}"
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "platform", f"{platform.platform()}, {available_cores()} cores"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "communication backends", ", ".join(_communication_backends()) or "none"
    yield from _accelerators()
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    registry = get_registry()
    for plugin in registry.plugins():
        what = plugin.reason or ", ".join(sorted(plugin.hooks))
        yield f"plugin {plugin.name}", f"{plugin.distribution} {plugin.version}: {what}"
    for report in registry.reports():
        yield f"backend {report.name}", "ready" if report.ready else f"not ready: {report.why}"
    numbering = {*(name for each in PLATFORMS for name in each.variables())}
    numbering.update(name for names in OTHERS for name in names.variables)
    for name, value in sorted(os.environ.items()):
        if name == TOKEN:
            yield name, "(set)"
        elif name.startswith(SHOWN_VARIABLES) or name in numbering:
            yield name, value


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _communication_backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]


def _accelerators() -> Iterator[tuple[str, str]]:
    """Every accelerator, hidden ones too, in the order in effect; then what hides or orders them, and its source."""
    from drivetrain.launch.devices import known_kinds, take_inventory, visible
    from drivetrain.registry import get_registry

    kinds = known_kinds(get_registry().devices())
    present, seen = take_inventory(kinds), visible()
    yield "accelerators", f"{len(present.devices)} {present.type}" if present.devices else "none"
    for device in present.devices:
        yield f"accelerator {present.type}", str(device)
    if len(seen.devices) != len(present.devices):
        yield "accelerators that torch sees", ", ".join(map(str, seen.devices)) or "none"
    for kind in kinds:
        if kind.type == present.type and kind.order:
            yield "order of accelerators", os.environ.get(kind.order, f"the driver's default; {kind.order} is not set")
    shown = {name for kind in kinds for name in (*kind.visibility, kind.order) if name}
    for name in sorted(shown & set(os.environ)):
        yield f"{name} (exported)", os.environ[name] or "(empty: hides all)"
