"""Finds the accelerators of this node, and selects which of them its workers see, and in what order.

Kinds of accelerators are data; a plugin adds a kind, or replaces one, by the hook ``drivetrain_devices``. A driver
reads the variables that hide and order devices once in a process, so a fresh interpreter without them lists what there
is (``python -m drivetrain.launch.devices``), and the launcher itself touches no device. Flags, file and exported
variables then become one choice. Ids are those of the machine, as its vendor's variable counts them: with
``CUDA_VISIBLE_DEVICES=2,3`` exported, ``--gpu_ids 3`` takes the second of the two, and ``--gpu_ids 0`` contradicts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

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


# In the order and with the visibility with which torch loads them itself.
_TORCH_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))


def preload_torch() -> None:
    """Start to load the libraries of ``import torch`` on another core: linking takes a fifth of that import.

    Python cannot end before the thread has, which is a fraction of a second. Does nothing but on Linux.
    """
    if "torch" not in sys.modules and sys.platform == "linux":
        threading.Thread(target=_load_libraries, name="drivetrain-preload").start()


def _load_libraries() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    with contextlib.suppress(OSError):  # `import torch` finds a missing library or reports it
        for name, mode in _TORCH_LIBRARIES:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)


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
    kind, ids = _kind_and_ids(request, present, kinds)
    variables: dict[str, str] = {}
    remarks: list[str] = []
    exported = next((name for name in kind.visibility if name in environ), None)
    shown = None if exported is None else _listed(environ[exported])
    if ids is not None:
        _check_form(ids, request, kind)
        if present is not None and not request.cpu:
            _check_presence(ids, request, present)
        if exported is not None and shown is not None:
            _check_exported(ids, shown, request, exported, environ[exported], present)
        if not kind.variable:
            raise ConfigError(
                f"{kind.vendor} devices cannot be chosen by id: no environment variable hides one of them",
                whose=request.ids_from,
                cure="Leave accelerator_ids out.",
            )
        variables[exported or kind.variable] = ",".join(ids)
    if exported is not None:
        remarks.append(f"{exported}={environ[exported]} was exported")
    if request.order is not None:
        variables |= _order(request, kind, environ)
    elif kind.order and kind.order in environ:
        remarks.append(f"{kind.order}={environ[kind.order]} was exported")
    remarks[:0] = [f"{name}={value}" for name, value in variables.items()]
    return Selection(variables, tuple(ids) if ids is not None else shown, tuple(remarks))


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


def _kind_and_ids(
    request: DeviceRequest, present: Inventory | None, kinds: Sequence[DeviceKind]
) -> tuple[DeviceKind, tuple[str, ...] | None]:
    """The vendor: named in the ids (``xpu:0``), else the machine's, else CUDA; and the ids without its name."""
    here = _kind_of(present, kinds)
    if not request.ids:
        return here or kinds[0], request.ids
    split = [name.rpartition(":") for name in request.ids]
    types = sorted({before for before, colon, _ in split if colon})
    known = {kind.type for kind in kinds}
    for name in types:
        if name not in known:
            raise ConfigError(
                f"{name!r} is no kind of accelerator",
                whose=request.ids_from,
                cure=f"Known: {', '.join(sorted(known))}.",
            )
    if len(types) > 1 or (types and not all(colon for _, colon, _ in split)):
        raise ConfigError(
            f"accelerator_ids {', '.join(request.ids)} mixes kinds of accelerators; one run uses one kind",
            whose=request.ids_from,
            cure=f"Choose ids of one kind{f'; {present}' if present else ''}.",
        )
    kind = next((each for each in kinds if each.type == types[0]), None) if types else None
    if kind is not None and here is not None and kind.type == here.type:
        kind = here
    if kind is not None and present is not None and not request.cpu and (here is None or here.type != kind.type):
        raise ConfigError(
            f"there is no {kind.type} accelerator on this machine",
            whose=request.ids_from,
            cure=f"Correct the ids, or run on the CPU with --cpu; {present}.",
        )
    return kind or here or kinds[0], tuple(name for _, _, name in split)


def _kind_of(present: Inventory | None, kinds: Iterable[DeviceKind]) -> DeviceKind | None:
    if present is None or not present.devices:
        return None
    fitting = [kind for kind in kinds if kind.type == present.type]
    return next((kind for kind in fitting if kind.vendor == present.vendor), fitting[0] if fitting else None)


def _check_form(ids: Sequence[str], request: DeviceRequest, kind: DeviceKind) -> None:
    wrong = [name for name in ids if not re.fullmatch(kind.ids, name)]
    if wrong:
        raise ConfigError(
            f"{', '.join(map(repr, wrong))} cannot be ids of {kind.vendor} devices",
            whose=request.ids_from,
            cure="Write numbers in the wished order, such as 0,2"
            + (", or UUIDs as `nvidia-smi -L` lists them." if "GPU" in kind.ids else "."),
        )
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} names {', '.join(repeated)} more than once",
            whose=request.ids_from,
            cure="Name each accelerator once; one process uses one accelerator.",
        )
    if len({name.isdecimal() for name in ids}) > 1 and "GPU" in kind.ids:
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} mixes numbers and UUIDs, of which the driver reads only one kind",
            whose=request.ids_from,
            cure="Write only numbers or only UUIDs.",
        )


def _check_presence(ids: Sequence[str], request: DeviceRequest, present: Inventory) -> None:
    found = {name: _identity(name, present) for name in ids}
    missing = [name for name in ids if found[name] is None]
    if missing:
        raise ConfigError(
            f"accelerator {', '.join(missing)} does not exist; {present}",
            whose=request.ids_from,
            cure="`drivetrain env` lists the accelerators; --cpu trains without any.",
        )
    if len(set(found.values())) < len(ids):
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} names one accelerator twice; {present}",
            whose=request.ids_from,
            cure="Name each accelerator once; one process uses one accelerator.",
        )


def _identity(name: str, present: Inventory) -> int | str | None:
    """Number of the device that is named by number or by (the beginning of) its UUID; ``None`` when there is none.

    A part of a device is its own identity: a tile (``0.1``) of one that is there, and a MIG slice, whose UUID torch
    does not list.
    """
    whole, dot, _ = name.partition(".")
    for device in present.devices:
        if whole == str(device.index) or (device.uuid and device.uuid.startswith(name)):
            return name if dot else device.index
    return name if name.startswith("MIG-") else None


def _check_exported(
    ids: Sequence[str],
    shown: Sequence[str],
    request: DeviceRequest,
    variable: str,
    value: str,
    present: Inventory | None,
) -> None:
    def normal(name: str) -> object:
        identity = None if present is None else _identity(name, present)
        return name if identity is None else identity

    allowed = set(map(normal, shown))
    beyond = [name for name in ids if normal(name) not in allowed]
    if beyond or (not ids and shown):
        asked = f"accelerator_ids {','.join(ids) or '(none)'}"
        raise ConfigError(
            f"{asked} contradicts {variable}={value!r}, which is exported in this shell",
            whose=request.ids_from,
            cure=f"`unset {variable}` or leave accelerator_ids out; ids are numbers of the machine, not of that list.",
        )


def _order(request: DeviceRequest, kind: DeviceKind, environ: Mapping[str, str]) -> dict[str, str]:
    assert request.order is not None
    if not kind.order:
        raise ConfigError(
            f"device_order {request.order} has no meaning for {kind.vendor} devices, whose order cannot be chosen",
            whose=request.order_from,
            cure="Leave device_order out.",
        )
    value = ORDERS[request.order]
    exported = environ.get(kind.order)
    if exported is not None and exported != value:
        raise ConfigError(
            f"device_order {request.order} contradicts {kind.order}={exported!r}, which is exported in this shell",
            whose=request.order_from,
            cure=f"`unset {kind.order}` or leave device_order out.",
        )
    return {kind.order: value}


def _listed(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(visible())) + "\n")
