"""Detects whether ``torch_xla`` can run here, from version numbers and the PCI bus; imports nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata, util
from pathlib import Path

from drivetrain.api import Readiness
from drivetrain_xla import chips

SUPPORTED = "2.9"
"""The torch_xla that this plugin was written for and tested with, and the only torch that it can be loaded into."""

INSTALL = f'pip install "torch=={SUPPORTED}.*" "torch_xla=={SUPPORTED}.*"'
INSTALL_TPU = f'pip install "torch=={SUPPORTED}.*" "torch_xla[tpu]=={SUPPORTED}.*"'
DEVICE = "PJRT_DEVICE"
"""torch_xla's variable for the kind of device: ``TPU``, ``CPU``, ..."""


def version_of(distribution: str) -> str | None:
    """Installed version, ``None`` when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe() -> Readiness:
    """The probe of the backend, on this machine."""
    return judge(version_of, os.environ, has_libtpu=has_libtpu(os.environ))


def has_libtpu(environ: Mapping[str, str]) -> bool:
    """Whether the library that drives TPUs can be found."""
    return "TPU_LIBRARY_PATH" in environ or util.find_spec("libtpu") is not None


def judge(
    version: Callable[[str], str | None], environ: Mapping[str, str], *, has_libtpu: bool, bus: Path = chips.PCI
) -> Readiness:
    """Ready or blocked, from installed versions, the environment and the PCI bus."""
    torch, torch_xla = version("torch"), version("torch_xla")
    if torch_xla is None:
        return _absent(version("torch_tpu"))
    if _minor(torch_xla) != SUPPORTED:
        return Readiness(
            False, f"torch_xla {torch_xla} is installed, this plugin works with torch_xla {SUPPORTED}", _own(INSTALL)
        )
    if torch is None or _minor(torch) != SUPPORTED:
        return Readiness(
            False,
            f"torch_xla {torch_xla} is linked to torch {SUPPORTED}, but torch {torch} is installed: importing it fails",
            _own(INSTALL),
        )
    asked = environ.get(DEVICE)
    found = chips.present(bus)
    if asked == "TPU" and not found:
        return Readiness(
            False,
            f"{DEVICE}=TPU, but this machine has no TPU",
            f"Unset {DEVICE} and write use_cpu: true (--cpu) to run XLA on the CPU, or start on a TPU machine.",
        )
    if (asked == "TPU" or (asked is None and found)) and not has_libtpu:
        return Readiness(
            False,
            f"this machine has {len(found)} chip(s), {found[0]}, but not libtpu, which drives them",
            f"Run: {INSTALL_TPU}",
        )
    if asked is None and not found:
        return Readiness(True, "this machine has no TPU: XLA runs on its CPU, with use_cpu: true (--cpu)")
    return Readiness(True)


def _absent(torch_tpu: str | None) -> Readiness:
    if torch_tpu is not None:
        return Readiness(
            False,
            f"torch_xla is not installed; TorchTPU {torch_tpu} is, whose device the backends of torch train on",
            "Write distributed_type: ddp or fsdp, which take the device tpu by themselves.",
        )
    return Readiness(False, "torch_xla is not installed", _own(INSTALL, INSTALL_TPU))


def _own(command: str, on_tpu: str = "") -> str:
    """The cure, with the reason why it is not run in the environment at hand."""
    further = f" (on a TPU machine: {on_tpu})" if on_tpu else ""
    return f"In an environment of its own, since it replaces torch, run: {command}{further}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
