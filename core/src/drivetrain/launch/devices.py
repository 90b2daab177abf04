"""Finds the accelerators of this node, and selects the devices visible to its workers, and their order.

Kinds of accelerators are data; a plugin adds a kind, or replaces one, by the hook ``drivetrain_devices``. A driver
reads the variables that hide and order devices once in a process, so a fresh interpreter without them lists what there
is (``python -m drivetrain.launch.devices``), and the launcher itself touches no device. Flags, file and exported
variables then become one choice. Ids are those of the machine, as its vendor's variable counts them: with
``CUDA_VISIBLE_DEVICES=2,3`` exported, ``--gpu_ids 3`` takes the second of the two, and ``--gpu_ids 0`` contradicts it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from drivetrain.errors import ConfigError, DrivetrainError


@dataclass(frozen=True)
class DeviceKind:
    """One vendor's kind of accelerator, as the launcher needs it.

    Args:
        type: torch's name of the device type; two vendors may share one.
        vendor: its name in messages.
        visibility: environment variables that hide devices, the one that we set first; empty when there is none.
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
"""Kinds of accelerators that the core supports."""

ORDERS = {"pci_bus_id": "PCI_BUS_ID", "fastest_first": "FASTEST_FIRST"}
"""Values of ``device_order``, and what CUDA calls them."""


def kind_from(description: Mapping[str, str]) -> DeviceKind:
    """One kind from the answer of a plugin's hook. ``vendor``, ``ids`` and ``order`` may be missing."""
    optional = {name: description[name] for name in ("ids", "order") if name in description}
    return DeviceKind(
        description["type"],
        description.get("vendor", description["type"]),
        tuple(description.get("visibility", "").replace(",", " ").split()),
        description.get("communication_backend", "gloo"),
        **optional,
    )


def known_kinds(described: Iterable[Mapping[str, str]] = ()) -> tuple[DeviceKind, ...]:
    """All kinds: a plugin's description replaces the core's of the same type."""
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


INVENTORY_SECONDS = 120
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
    """List all of the machine's devices, hidden ones too, in a fresh interpreter. Takes as long as ``import torch``.

    Args:
        kinds: their visibility variables are taken out of the environment.
        environ: the environment; ``None`` = this process's.

    Raises:
        DrivetrainError: the interpreter failed; its last line is shown.
    """
    hidden = {name for kind in kinds for name in kind.visibility}
    environ = os.environ if environ is None else environ
    ended = subprocess.run(
        [sys.executable, "-m", "drivetrain.launch.devices"],
        env={name: value for name, value in environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=INVENTORY_SECONDS,
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
    """The devices that torch sees in this process. Imports torch and may start the vendor's driver."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return Inventory()
    devices = tuple(_describe(kind.type, index) for index in range(torch.accelerator.device_count()))
    vendor = "AMD" if torch.version.hip else "NVIDIA" if kind.type == "cuda" else ""
    return Inventory(kind.type, vendor, devices)


def _describe(device_type: str, index: int) -> Device:
    """Properties from torch's module of the device; which of them exist differs between vendors."""
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


@dataclass(frozen=True)
class DeviceRequest:
    """The user's choice of devices.

    Args:
        ids: identifiers in the wished order; ``None`` = all, empty = none, which means the CPU.
        ids_from: where they were written, for messages.
        order: ``pci_bus_id`` or ``fastest_first``; ``None`` leaves it alone.
        order_from: where that was written.
        cpu: training stays on the CPU whatever devices there are; ids are passed on unchecked.
    """

    ids: tuple[str, ...] | None = None
    ids_from: str = "default"
    order: str | None = None
    order_from: str = "default"
    cpu: bool = False


@dataclass(frozen=True)
class Selection:
    """The devices that the launcher selected.

    Args:
        variables: to be set for the workers.
        devices: identifiers chosen by flags, file or an exported variable, in order; ``None`` = whatever torch sees.
        remarks: what is worth saying when the run starts.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def on_cpu(self) -> bool:
        """Whether every device is hidden."""
        return self.devices == ()


def choose(
    request: DeviceRequest,
    environ: Mapping[str, str],
    present: Inventory | None = None,
    kinds: Sequence[DeviceKind] = KINDS,
) -> Selection:
    """Decide which devices the workers see.

    Args:
        request: what was asked for.
        environ: the launcher's environment; what the user exported is honoured.
        present: what this machine has; ``None`` = not known, then ids are not compared with it.
        kinds: the vendors' variables.

    Raises:
        ConfigError: ids that are malformed, repeated, of several vendors or not there, or that an exported variable
            contradicts.
    """
    kind, ids, mistake = _split(request, present, kinds)
    exported = next((name for name in kind.visibility if name in environ), "")
    shown = tuple(filter(None, map(str.strip, environ[exported].split(",")))) if exported else None
    variables: dict[str, str] = {}
    if ids is not None:
        mistake = mistake or _mistake_of_form(ids, kind)
        if mistake is None and present is not None and not request.cpu:
            mistake = _mistake_of_presence(ids, present)
        if mistake is None and shown is not None:
            mistake = _contradiction(ids, shown, f"{exported}={environ[exported]!r}", present)
        if mistake is not None:
            what, cure = mistake
            raise ConfigError(what, whose=request.ids_from, cure=cure)
        variables[exported or kind.visibility[0]] = ",".join(ids)
    remarks = [f"{exported}={environ[exported]} was exported"] if exported else []
    if request.order is not None:
        variables |= _order(request.order, request, kind, environ)
    elif kind.order and kind.order in environ:
        remarks.append(f"{kind.order}={environ[kind.order]} was exported")
    remarks[:0] = [f"{name}={value}" for name, value in variables.items()]
    return Selection(variables, shown if ids is None else ids, tuple(remarks))


def check_count(processes: int, devices: Sequence[str], present: Inventory | None) -> None:
    """Refuse more processes than devices. Training on the CPU (no device at all) has no such limit.

    Raises:
        ConfigError: with the list of what is there.
    """
    if devices and processes > len(devices):
        raise ConfigError(
            f"{processes} processes on this machine need as many accelerators, and {len(devices)} can be used:"
            f" {', '.join(devices)}",
            whose="" if present is None else str(present),
            cure=f"Write num_processes: {len(devices)}, choose more accelerator_ids, or run on the CPU with --cpu.",
        )


Mistake = tuple[str, str]
"""A problem with device ids, and the cure."""


def _split(
    request: DeviceRequest, present: Inventory | None, kinds: Sequence[DeviceKind]
) -> tuple[DeviceKind, tuple[str, ...] | None, Mistake | None]:
    """The kind: named in the ids (``xpu:0``), else the machine's, else CUDA; the ids without its name; a mistake."""
    here = None
    if present is not None and present.devices:
        of_type = [kind for kind in kinds if kind.type == present.type]
        here = next((kind for kind in of_type if kind.vendor == present.vendor), of_type[0] if of_type else None)
    kind = here or kinds[0]
    if not request.ids:
        return kind, request.ids, None
    split = [name.rpartition(":") for name in request.ids]
    ids = tuple(name for _, _, name in split)
    types = sorted({before for before, colon, _ in split if colon})
    known = {each.type: each for each in reversed(kinds)}
    for name in types:
        if name not in known:
            return kind, ids, (f"{name!r} is no kind of accelerator", f"Known: {', '.join(sorted(known))}.")
    if len(types) > 1 or (types and not all(colon for _, colon, _ in split)):
        what = f"accelerator_ids {', '.join(request.ids)} mixes kinds of accelerators; one run uses one kind"
        return kind, ids, (what, f"Choose ids of one kind{f'; {present}' if present else ''}.")
    if not types or kind.type == types[0]:
        return kind, ids, None
    if present is not None and not request.cpu:
        what = f"there is no {types[0]} accelerator on this machine"
        return kind, ids, (what, f"Correct the ids, or run on the CPU with --cpu; {present}.")
    return known[types[0]], ids, None


def _mistake_of_form(ids: Sequence[str], kind: DeviceKind) -> Mistake | None:
    named = f"accelerator_ids {','.join(ids)}"
    has_uuids = "GPU" in kind.ids
    if not kind.visibility:
        what = f"{kind.vendor} devices cannot be chosen by id: no environment variable hides one of them"
        return what, "Leave accelerator_ids out."
    if wrong := [name for name in ids if not re.fullmatch(kind.ids, name)]:
        uuids = ", or UUIDs as `nvidia-smi -L` lists them." if has_uuids else "."
        what = f"{', '.join(map(repr, wrong))} cannot be ids of {kind.vendor} devices"
        return what, f"Write numbers in the wished order, such as 0,2{uuids}"
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        return f"{named} names {', '.join(repeated)} more than once", _ONCE
    if has_uuids and len({name.isdecimal() for name in ids}) > 1:
        what = f"{named} mixes numbers and UUIDs, of which the driver reads only one kind"
        return what, "Write only numbers or only UUIDs."
    return None


_ONCE = "Name each accelerator once; one process uses one accelerator."


def _mistake_of_presence(ids: Sequence[str], present: Inventory) -> Mistake | None:
    found = {name: _identity(name, present) for name in ids}
    if missing := [name for name in ids if found[name] is None]:
        named = f"accelerator {missing[0]} does" if len(missing) == 1 else f"accelerators {', '.join(missing)} do"
        what = f"{named} not exist; {present}"
        return what, "`drivetrain env` lists the accelerators; --cpu trains without any."
    if len(set(found.values())) < len(ids):
        return f"accelerator_ids {','.join(ids)} names one accelerator twice; {present}", _ONCE
    return None


def _identity(name: str, present: Inventory | None) -> int | str | None:
    """Number of the device that is named by number or by (the beginning of) its UUID; ``None`` when there is none.

    A part of a device is its own identity: a tile (``0.1``) of one that is there, and a MIG slice, whose UUID torch
    does not list.
    """
    whole, dot, _ = name.partition(".")
    for device in () if present is None else present.devices:
        if whole == str(device.index) or (device.uuid and device.uuid.startswith(name)):
            return name if dot else device.index
    return name if name.startswith("MIG-") else None


def _contradiction(
    ids: Sequence[str], shown: Sequence[str], exported: str, present: Inventory | None
) -> Mistake | None:
    """Ids that an exported variable hides, or its devices where none were asked for."""
    identities = {name: _identity(name, present) for name in (*ids, *shown)}
    asked, allowed = (
        {name if identities[name] is None else identities[name] for name in names} for names in (ids, shown)
    )
    if asked <= allowed and bool(ids) == bool(shown):
        return None
    what = f"accelerator_ids {','.join(ids) or '(none)'} contradicts {exported}, which is exported in this shell"
    unset = f"`unset {exported.partition('=')[0]}`"
    return what, f"{unset} or leave accelerator_ids out; ids are numbers of the machine, not of that list."


def _order(wanted: str, request: DeviceRequest, kind: DeviceKind, environ: Mapping[str, str]) -> dict[str, str]:
    exported = environ.get(kind.order)
    if kind.order and exported in (None, ORDERS[wanted]):
        return {kind.order: ORDERS[wanted]}
    if not kind.order:
        what = f"has no meaning for {kind.vendor} devices, whose order cannot be chosen"
        raise ConfigError(f"device_order {wanted} {what}", whose=request.order_from, cure="Leave device_order out.")
    raise ConfigError(
        f"device_order {wanted} contradicts {kind.order}={exported!r}, which is exported in this shell",
        whose=request.order_from,
        cure=f"`unset {kind.order}` or leave device_order out.",
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(visible())) + "\n")
