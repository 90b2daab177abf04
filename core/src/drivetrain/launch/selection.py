"""Which accelerators the workers see, and in what order: flags, file and exported variables become one. No torch.

Ids are those of the machine, as its vendor's variable counts them: with ``CUDA_VISIBLE_DEVICES=2,3`` exported,
``--gpu_ids 3`` takes the second of the two, and ``--gpu_ids 0`` contradicts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.errors import ConfigError
from drivetrain.launch.devices import KINDS, ORDERS, DeviceKind
from drivetrain.launch.inventory import Inventory


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

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
    """What the launcher does about it.

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
        """Every device is hidden."""
        return self.devices == ()


def choose(
    wish: Wish, environ: Mapping[str, str], present: Inventory | None = None, kinds: Sequence[DeviceKind] = KINDS
) -> Selection:
    """Settle which devices the workers see.

    Args:
        wish: what was asked for.
        environ: the launcher's environment; what the user exported is honoured.
        present: what this machine has; ``None`` = not known, then ids are not compared with it.
        kinds: the vendors' variables.

    Raises:
        ConfigError: ids that are malformed, repeated, of several vendors or not there, or that an exported variable
            contradicts.
    """
    kind, ids = _kind_and_ids(wish, present, kinds)
    variables: dict[str, str] = {}
    remarks: list[str] = []
    exported = next((name for name in kind.visibility if name in environ), None)
    shown = None if exported is None else _listed(environ[exported])
    if ids is not None:
        _check_form(ids, wish, kind)
        if present is not None and not wish.cpu:
            _check_presence(ids, wish, present)
        if exported is not None and shown is not None:
            _check_exported(ids, shown, wish, exported, environ[exported], present)
        if not kind.variable:
            raise ConfigError(
                f"{kind.vendor} devices cannot be chosen by id: no environment variable hides one of them",
                whose=wish.ids_from,
                cure="Leave accelerator_ids out.",
            )
        variables[exported or kind.variable] = ",".join(ids)
    if exported is not None:
        remarks.append(f"{exported}={environ[exported]} was exported")
    if wish.order is not None:
        variables |= _order(wish, kind, environ)
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
    wish: Wish, present: Inventory | None, kinds: Sequence[DeviceKind]
) -> tuple[DeviceKind, tuple[str, ...] | None]:
    """The vendor: named in the ids (``xpu:0``), else the machine's, else CUDA; and the ids without its name."""
    here = _kind_of(present, kinds)
    if not wish.ids:
        return here or kinds[0], wish.ids
    split = [name.rpartition(":") for name in wish.ids]
    types = sorted({before for before, colon, _ in split if colon})
    known = {kind.type for kind in kinds}
    for name in types:
        if name not in known:
            raise ConfigError(
                f"{name!r} is no kind of accelerator", whose=wish.ids_from, cure=f"Known: {', '.join(sorted(known))}."
            )
    if len(types) > 1 or (types and not all(colon for _, colon, _ in split)):
        raise ConfigError(
            f"accelerator_ids {', '.join(wish.ids)} mixes kinds of accelerators; one run uses one kind",
            whose=wish.ids_from,
            cure=f"Choose ids of one kind{f'; {present}' if present else ''}.",
        )
    kind = next((each for each in kinds if each.type == types[0]), None) if types else None
    if kind is not None and here is not None and kind.type == here.type:
        kind = here
    if kind is not None and present is not None and not wish.cpu and (here is None or here.type != kind.type):
        raise ConfigError(
            f"there is no {kind.type} accelerator on this machine",
            whose=wish.ids_from,
            cure=f"Correct the ids, or run on the CPU with --cpu; {present}.",
        )
    return kind or here or kinds[0], tuple(name for _, _, name in split)


def _kind_of(present: Inventory | None, kinds: Iterable[DeviceKind]) -> DeviceKind | None:
    if present is None or not present.devices:
        return None
    fitting = [kind for kind in kinds if kind.type == present.type]
    return next((kind for kind in fitting if kind.vendor == present.vendor), fitting[0] if fitting else None)


def _check_form(ids: Sequence[str], wish: Wish, kind: DeviceKind) -> None:
    wrong = [name for name in ids if not re.fullmatch(kind.ids, name)]
    if wrong:
        raise ConfigError(
            f"{', '.join(map(repr, wrong))} cannot be ids of {kind.vendor} devices",
            whose=wish.ids_from,
            cure="Write numbers in the wished order, such as 0,2"
            + (", or UUIDs as `nvidia-smi -L` lists them." if "GPU" in kind.ids else "."),
        )
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} names {', '.join(repeated)} more than once",
            whose=wish.ids_from,
            cure="Name each accelerator once; one process uses one accelerator.",
        )
    if len({name.isdecimal() for name in ids}) > 1 and "GPU" in kind.ids:
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} mixes numbers and UUIDs, of which the driver reads only one kind",
            whose=wish.ids_from,
            cure="Write only numbers or only UUIDs.",
        )


def _check_presence(ids: Sequence[str], wish: Wish, present: Inventory) -> None:
    found = {name: _identity(name, present) for name in ids}
    missing = [name for name in ids if found[name] is None]
    if missing:
        raise ConfigError(
            f"accelerator {', '.join(missing)} does not exist; {present}",
            whose=wish.ids_from,
            cure="`drivetrain env` lists the accelerators; --cpu trains without any.",
        )
    if len(set(found.values())) < len(ids):
        raise ConfigError(
            f"accelerator_ids {','.join(ids)} names one accelerator twice; {present}",
            whose=wish.ids_from,
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
    ids: Sequence[str], shown: Sequence[str], wish: Wish, variable: str, value: str, present: Inventory | None
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
            whose=wish.ids_from,
            cure=f"`unset {variable}` or leave accelerator_ids out; ids are numbers of the machine, not of that list.",
        )


def _order(wish: Wish, kind: DeviceKind, environ: Mapping[str, str]) -> dict[str, str]:
    assert wish.order is not None
    if not kind.order:
        raise ConfigError(
            f"device_order {wish.order} has no meaning for {kind.vendor} devices, whose order cannot be chosen",
            whose=wish.order_from,
            cure="Leave device_order out.",
        )
    value = ORDERS[wish.order]
    exported = environ.get(kind.order)
    if exported is not None and exported != value:
        raise ConfigError(
            f"device_order {wish.order} contradicts {kind.order}={exported!r}, which is exported in this shell",
            whose=wish.order_from,
            cure=f"`unset {kind.order}` or leave device_order out.",
        )
    return {kind.order: value}


def _listed(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())
