"""Describes machines by numbers, and computes times of work and communication on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from drivetrain.api import UsageError
from drivetrain_planner.estimates import Traffic, Work
from drivetrain_planner.inputs import size


@dataclass(frozen=True)
class Link:
    """Connection between ranks.

    Args:
        latency: seconds of a call.
        bandwidth: bytes in a second that one rank sends.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """One kind of machine.

    Args:
        name: of one device.
        device_type: ``"cuda"``, ``"cpu"``, ...
        memory: bytes of one device.
        devices: on one machine.
        flops: floating-point operations in a second, in float32 matrix products.
        half_flops: the same in bfloat16 and float16.
        bandwidth: bytes in a second between a device and its memory.
        launch: seconds that a kernel takes at least.
        inside: between devices of one machine.
        outside: between machines.
        context: bytes that the driver and libraries hold on a device, beside tensors.
        host: between one device and host memory.
        host_bandwidth: bytes in a second that an optimizer's step in host memory reads and writes, in all processes of
            one machine together.
    """

    name: str
    device_type: str
    memory: int
    devices: int
    flops: float
    half_flops: float
    bandwidth: float
    launch: float
    inside: Link
    outside: Link
    context: int = 2**30
    host: Link = Link(1e-5, 25e9)
    host_bandwidth: float = 1e10

    # ---- time ---------------------------------------------------------------------------------------------------

    def work(self, kernels: Sequence[Work]) -> float:
        """Seconds of these kernels one after the other: each is bound by arithmetic, by memory, or by its launch."""
        total = 0.0
        for each in kernels:
            rate = self.half_flops if each.itemsize <= 2 else self.flops
            total += each.count * max(each.flops / rate, each.bytes / self.bandwidth, self.launch)
        return total

    def traffic(self, one: Traffic) -> float:
        """Seconds of one kind of communication in a step: latency of its calls, and bytes of a ring.

        On a CPU gloo reduces everything on every rank, of which each keeps its part.
        """
        if one.operation == "host_copy":
            return one.calls * self.host.latency + one.bytes / self.host.bandwidth
        if one.ranks < 2:
            return 0.0
        link = self.inside if one.ranks <= self.devices else self.outside
        share = (one.ranks - 1) / one.ranks
        scattered = 2 * share if self.device_type == "cpu" else share
        sent = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": scattered}.get(one.operation, 1.0)
        return one.calls * link.latency + sent * one.bytes / link.bandwidth


_GIB = 2**30

_PCIE_5 = Link(1e-5, 50e9)

MACHINES = {
    "h100": Machine(
        *("h100", "cuda", 80 * 10**9, 1, 300e12, 550e12, 2.6e12, 4e-6),
        *(Link(2e-5, 300e9), Link(4e-5, 40e9)),
        host=_PCIE_5,
    ),
    "b200": Machine(
        *("b200", "cuda", 180 * 10**9, 1, 650e12, 1250e12, 6.4e12, 4e-6),
        *(Link(2e-5, 600e9), Link(4e-5, 40e9)),
        host=_PCIE_5,
    ),
    "h200": Machine(
        *("h200", "cuda", 141 * 10**9, 1, 300e12, 550e12, 3.8e12, 4e-6),
        *(Link(2e-5, 300e9), Link(4e-5, 40e9)),
        host=_PCIE_5,
    ),
    "a100": Machine(
        *("a100", "cuda", 80 * 10**9, 1, 110e12, 220e12, 1.6e12, 5e-6), Link(2e-5, 200e9), Link(4e-5, 20e9)
    ),
    "a100-40gb": Machine(
        *("a100-40gb", "cuda", 40 * 10**9, 1, 110e12, 220e12, 1.2e12, 5e-6), Link(2e-5, 200e9), Link(4e-5, 20e9)
    ),
    "a6000": Machine(
        *("a6000", "cuda", 48 * _GIB, 1, 45e12, 85e12, 0.61e12, 5e-6), Link(3e-5, 12e9), Link(5e-5, 1e9)
    ),
    "rtx4090": Machine(
        *("rtx4090", "cuda", 24 * _GIB, 1, 60e12, 140e12, 0.85e12, 5e-6), Link(3e-5, 12e9), Link(5e-5, 1e9)
    ),
    "cpu": Machine(
        *("cpu", "cpu", 16 * _GIB, 1, 4e10, 2e10, 8e9, 1e-5),
        *(Link(1.5e-3, 1e9), Link(2e-3, 1e8)),
        context=0,
        host=Link(1e-5, 8e9),
        host_bandwidth=8e9,
    ),
}
"""Machines by name: about half of the makers' peaks in arithmetic, and four fifths of their memory bandwidth; float32
of NVIDIA devices is TF32. They rank layouts, and do not promise seconds; a file says what yours are. A message between
two processes on a CPU takes as long as it took between two that compute meanwhile, on two cores.

Links to host memory are four fifths of PCI Express with 16 lanes: 63 GB/s of generation 5 (B200, H100, H200), 31.5 of
generation 4 (the others). The step in host memory is slower than that memory: of LLaMA-7B on eight A800 beside two Xeon
8358, ZeRO 2 with ``offload_optimizer`` was published to take 20 s longer for a step of 64 samples than without
(1.81 and 4.19 samples/s; gist chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a), in which AdamW reads and writes 28 bytes for
each of 6.7 billion parameters."""


HERE = "here"
"""The name of the machine that ``drivetrain plan measure`` has measured."""


def kept_file() -> Path:
    """Return the path of the measured machine file, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drivetrain" / "machine.yaml"


SUFFIXES = (".yaml", ".yml")
"""By which a machine's file is told from its name."""


def find(asked: str, devices: int | None = None, memory: str | None = None) -> Machine:
    """A machine by name (``h100x8``: eight devices), or from a YAML file of the fields of :class:`Machine`.

    Args:
        asked: name or file, or ``here`` for this machine as it was measured. In a file ``base`` names the machine whose
            numbers hold where it says nothing.
        devices: on one machine, where they are not said.
        memory: of one device; replaces the machine's.

    Raises:
        UsageError: it is not known, or the file holds something else.
    """
    path = kept_file() if asked == HERE else Path(asked)
    if asked == HERE and not path.exists():
        raise UsageError("this machine has not been measured", cure="Run: drivetrain plan measure")
    machine = _read(path) if path.suffix in SUFFIXES else _known(asked)
    if devices is not None and machine.devices == 1:
        machine = replace(machine, devices=devices)
    return machine if memory is None else replace(machine, memory=size(memory))


def _known(asked: str) -> Machine:
    name, _, count = asked.lower().rpartition("x")
    if name in MACHINES and count.isdecimal() and int(count):
        return replace(MACHINES[name], devices=int(count))
    if asked.lower() in MACHINES:
        return MACHINES[asked.lower()]
    names = f"{', '.join(MACHINES)}, with x8 after it for eight devices"
    raise UsageError(
        f"there is no machine {asked!r}", cure=f"Name {HERE}, one of {names}, or a YAML file of its numbers."
    )


def _link(values: Any) -> Link:
    return Link(**{name: float(value) for name, value in values.items()})


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("inside", "outside", "host"), _link),
    **dict.fromkeys(("flops", "half_flops", "bandwidth", "launch", "host_bandwidth"), float),
    **dict.fromkeys(("memory", "context"), lambda value: size(str(value))),
    "devices": lambda value: int(str(value)),
}
"""By key of a machine's file, the conversion of what YAML reads there."""


def _read(path: Path) -> Machine:
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}", cure="Name a YAML file, or a machine.") from problem
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no keys and values", cure="Write `base: h100` and what differs from it.")
    base = _known(str(values.pop("base", "cpu")))
    unknown = sorted(map(str, set(values) - set(vars(base))))
    if unknown:
        known = ", ".join(vars(base))
        raise UsageError(f"{path}: unknown {', '.join(unknown)}", cure=f"The keys are base, {known}.")
    for key in [key for key in _CONVERSIONS if key in values]:
        try:
            values[key] = _CONVERSIONS[key](values[key])
        except (TypeError, ValueError, AttributeError) as problem:
            cure = "Links are `{latency: 2e-5, bandwidth: 1e9}`, sizes such as 24GiB, everything else numbers."
            raise UsageError(f"{path}: {key} cannot be {values[key]!r}", cure=cure) from problem
    return replace(base, **{"name": path.stem, **values})
