"""Defines ``DistributedType``, the backends' names as scripts compare them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from drivetrain.registry import get_registry


class _Names(type):
    """Metaclass that makes every upper-case attribute a member, as in an enum; members are the known backends."""

    def __getattr__(cls, name: str) -> DistributedType:
        if name.startswith("_") or not name.isupper():
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}; names of backends are in upper case here")
        return DistributedType(name)

    def __getitem__(cls, name: str) -> DistributedType:
        return DistributedType(name)

    def __iter__(cls) -> Iterator[DistributedType]:
        return (DistributedType(name) for name in get_registry().names())

    def __contains__(cls, name: object) -> bool:
        return isinstance(name, str) and get_registry().canonical(name) in get_registry().names()


@final
class DistributedType(str, metaclass=_Names):
    """A backend's name, as Accelerate's scripts ask for it: ``accelerator.distributed_type == DistributedType.FSDP``.

    It is a string and equal to the name that configuration files use (``"fsdp"``). Accelerate names plain data
    parallelism by the device (``MULTI_GPU``, ``MULTI_CPU``, ``MULTI_XPU``); these are equal to the same backend's name
    on that type of device alone. ``DistributedType("MULTI_GPU")`` and ``DistributedType["MULTI_GPU"]`` are the member
    ``DistributedType.MULTI_GPU``.

    Args:
        name: any name that a backend goes by, in upper or lower case.
        device_type: ``cuda``, ``cpu``, ...: what it runs on; ``None`` for any, or for the one that `name` says.
    """

    __slots__ = ("device_type",)

    def __new__(cls, name: str, device_type: str | None = None) -> DistributedType:
        """Look the name up."""
        made = str.__new__(cls, get_registry().canonical(name))
        word = name.upper()
        if device_type is None and word.startswith(_BY_DEVICE):
            device_type = _DEVICES.get(word, word.removeprefix(_BY_DEVICE).lower())
        made.device_type = device_type
        return made

    device_type: str | None

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.device_type

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DistributedType) and None not in (self.device_type, other.device_type):
            return str.__eq__(self, other) and self.device_type == other.device_type
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"DistributedType.{self.name}"

    @property
    def name(self) -> str:
        """In upper case, as an attribute."""
        return self.upper()

    @property
    def value(self) -> str:
        """The name that configuration files use."""
        return str.__str__(self)


_BY_DEVICE = "MULTI_"

_DEVICES = {"MULTI_GPU": "cuda"}
"""Accelerate's names that differ from torch's device type."""
