"""TPU chips of this machine, found on its PCI bus, and the device that TorchTPU makes of them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GOOGLE = "0x1ae0"
"""PCI vendor."""

CHIPS = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0063": "TPU v5e",
    "0x0062": "TPU v5p",
    "0x006f": "TPU v6e",
    "0x0076": "TPU 7x",
}
"""PCI device ids. Which chip has which number is read off torch_xla and libtpu, since Google publishes no table."""

VISIBILITY = "TPU_VISIBLE_CHIPS"
"""Numbers of the chips that a process may use, separated by commas; libtpu reads it once."""

PCI = Path("/sys/bus/pci/devices")


def present(bus: Path = PCI) -> list[str]:
    """Name of each TPU chip on the bus, hidden ones too; empty on a machine that has none."""
    found = []
    for vendor in sorted(bus.glob("*/vendor")):
        if vendor.read_text(encoding="ascii").strip() == GOOGLE:
            name = CHIPS.get((vendor.parent / "device").read_text(encoding="ascii").strip())
            found += [name] if name is not None else []
    return found


def usable(environ: Mapping[str, str], bus: Path = PCI) -> int:
    """Return the number of chips that this process may use."""
    chips = len(present(bus))
    listed = environ.get(VISIBILITY)
    return chips if listed is None else min(chips, len([number for number in listed.split(",") if number.strip()]))


def description(bus: Path = PCI) -> dict[str, str]:
    """The device as the hook ``drivetrain_devices`` describes it; ``chips`` is their number as text."""
    return {
        "type": "tpu",
        "vendor": "Google",
        "visibility": VISIBILITY,
        "communication_backend": "tpu_dist",
        "chips": str(len(present(bus))),
    }
