"""``DistributedType``: the names that scripts compare ``accelerator.distributed_type`` with.

Each upper-case attribute is a backend's canonical name, looked up when it is read, so that the set is as open as the
set of installed plugins: an alias becomes the name of the backend that brings it, any other word its lower-case form.
"""

from __future__ import annotations

from drivetrain.registry import get_registry


class _Names(type):
    """Makes every upper-case attribute of a class a backend's canonical name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_") or not name.isupper():
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}; names of backends are in upper case here")
        return get_registry().canonical(name)


class DistributedType(metaclass=_Names):
    """Names of backends as attributes: ``accelerator.distributed_type == DistributedType.MULTI_GPU``."""
