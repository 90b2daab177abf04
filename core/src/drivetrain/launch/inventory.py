"""Which accelerators this machine has, hidden ones included: asked in a process of its own.

A driver reads the variables that hide and order devices once in a process. The question is therefore put to a fresh
interpreter without them; the launcher itself touches no device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from drivetrain.errors import DrivetrainError
from drivetrain.launch.devices import DeviceKind

SECONDS = 120
"""A machine with eight GPUs and a cold driver answers in under 20."""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        index: its number, in the order in force.
        name: the vendor's name.
        uuid: ``GPU-...`` where the vendor gives one, else empty.
        capability: compute capability such as ``9.0``, else empty.
        memory: total bytes; 0 where it is not known.
        bus: PCI bus id, else empty.
    """

    index: int
    name: str
    uuid: str = ""
    capability: str = ""
    memory: int = 0
    bus: str = ""

    def __str__(self) -> str:
        facts = [f"compute capability {self.capability}"] if self.capability else []
        facts += [f"{self.memory / 2**30:.0f} GiB"] if self.memory else []
        facts += [text for text in (self.bus, self.uuid) if text]
        return f"{self.index}: {self.name}" + (f" ({', '.join(facts)})" if facts else "")


@dataclass(frozen=True)
class Inventory:
    """The accelerators of a machine, all of one type.

    Args:
        type: torch's device type, ``"cpu"`` when there is no accelerator.
        vendor: which of the vendors that share the type.
        devices: in the order in force.
    """

    type: str = "cpu"
    vendor: str = ""
    devices: tuple[Device, ...] = ()

    def __str__(self) -> str:
        if not self.devices:
            return "this machine has no accelerator that torch can use"
        return f"this machine has {self.type} " + "; ".join(map(str, self.devices))


def take_inventory(kinds: Iterable[DeviceKind], environ: Mapping[str, str] | None = None) -> Inventory:
    """Ask a fresh interpreter what the machine has when nothing is hidden. Takes about as long as ``import torch``.

    Args:
        kinds: their visibility variables are taken out of the environment.
        environ: the environment; ``None`` = this process's.

    Raises:
        DrivetrainError: the interpreter failed; its last line is shown.
    """
    hidden = {name for kind in kinds for name in kind.visibility}
    environ = os.environ if environ is None else environ
    ended = subprocess.run(
        [sys.executable, "-m", "drivetrain.launch.inventory"],
        env={name: value for name, value in environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise DrivetrainError(
            f"the accelerators of this machine could not be listed: {last}",
            cure="`python -c 'import torch; print(torch.accelerator.device_count())'` shows the whole failure.",
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Inventory(found["type"], found["vendor"], tuple(Device(**each) for each in found["devices"]))


def visible() -> Inventory:
    """What torch sees in this process, under its variables. Imports torch and may start the vendor's driver."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return Inventory()
    devices = tuple(_describe(kind.type, index) for index in range(torch.accelerator.device_count()))
    vendor = "AMD" if torch.version.hip else "NVIDIA" if kind.type == "cuda" else ""
    return Inventory(kind.type, vendor, devices)


def _describe(device_type: str, index: int) -> Device:
    """Facts that the device's module of torch gives; which of them exist differs between vendors."""
    import torch

    module = torch.get_device_module(device_type)
    properties = getattr(module, "get_device_properties", None)
    facts = properties(index) if properties is not None else None
    uuid = getattr(facts, "uuid", None)
    major, minor = getattr(facts, "major", None), getattr(facts, "minor", None)
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return Device(
        index,
        str(getattr(facts, "name", device_type)),
        "" if uuid is None else f"GPU-{uuid}",
        "" if major is None or device_type != "cuda" else f"{major}.{minor}",
        int(getattr(facts, "total_memory", 0)),
        "" if bus is None else f"{domain or 0:04x}:{bus:02x}:{slot or 0:02x}.0",
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(visible())) + "\n")
