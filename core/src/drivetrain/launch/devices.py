"""Kinds of accelerators as data: the variable that hides devices, how devices are named, who communicates. No torch.

A plugin adds a kind, or replaces one of these, by the hook ``drivetrain_devices``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceKind:
    """What a launcher has to know about one vendor's accelerators.

    Args:
        type: torch's name of the device type; two vendors may share one.
        vendor: as people say it.
        visibility: environment variables that hide devices, the one that we write first; empty when there is none.
        communication_backend: torch's choice for collectives between these devices.
        ids: pattern of one identifier in the variable.
        order: variable that decides which device is number 0; empty when there is none.
    """

    type: str
    vendor: str
    visibility: tuple[str, ...]
    communication_backend: str
    ids: str = r"\d+"
    order: str = ""

    @property
    def variable(self) -> str:
        """The variable that we write; empty when this kind has none."""
        return self.visibility[0] if self.visibility else ""


_UUID = r"GPU-[0-9a-fA-F-]+"

KINDS: tuple[DeviceKind, ...] = (
    DeviceKind(
        "cuda",
        "NVIDIA",
        ("CUDA_VISIBLE_DEVICES",),
        "nccl",
        rf"\d+|{_UUID}|MIG-[0-9a-fA-F/-]+",
        "CUDA_DEVICE_ORDER",
    ),
    DeviceKind(
        "cuda", "AMD", ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "nccl", rf"\d+|{_UUID}"
    ),
    DeviceKind("xpu", "Intel", ("ZE_AFFINITY_MASK",), "xccl", r"\d+(\.\d+)?"),
    DeviceKind("hpu", "Habana", ("HABANA_VISIBLE_MODULES",), "hccl"),
    DeviceKind("npu", "Ascend", ("ASCEND_RT_VISIBLE_DEVICES",), "hccl"),
    DeviceKind("mps", "Apple", (), "gloo"),
    DeviceKind("tpu", "Google", ("TPU_VISIBLE_CHIPS",), "tpu_dist"),
)
"""What the core knows by itself."""

ORDERS = {"pci_bus_id": "PCI_BUS_ID", "fastest_first": "FASTEST_FIRST"}
"""Values of ``device_order``, and what CUDA calls them."""


def kind_from(description: Mapping[str, str]) -> DeviceKind:
    """One kind from the answer of a plugin's hook. ``vendor``, ``ids`` and ``order`` may be missing."""
    return DeviceKind(
        description["type"],
        description.get("vendor", description["type"]),
        tuple(name for name in description.get("visibility", "").replace(",", " ").split() if name),
        description.get("communication_backend", "gloo"),
        description.get("ids", r"\d+"),
        description.get("order", ""),
    )


def known_kinds(described: Iterable[Mapping[str, str]] = ()) -> tuple[DeviceKind, ...]:
    """All kinds: what a plugin describes stands for what the core knows of the same type, others follow."""
    brought = tuple(map(kind_from, described))
    types = {kind.type for kind in brought}
    return (*(kind for kind in KINDS if kind.type not in types), *brought)


def hiding(environ: Mapping[str, str], device_type: str, kinds: Iterable[DeviceKind] = KINDS) -> str | None:
    """``NAME='value'`` of the variable that restricts which devices of this type are seen, ``None`` when none does."""
    for kind in kinds:
        for name in kind.visibility if kind.type == device_type else ():
            if name in environ:
                return f"{name}={environ[name]!r}"
    return None
