"""``DistributedType``, and the names that installed plugins add to ``drivetrain.utils``. Imports no torch."""

from __future__ import annotations

import logging
from typing import Any

from drivetrain.errors import AbsentNameError, BackendConflictError, BackendError, listed
from drivetrain.registry import get_registry, import_object, known_extras, pip_line

logger = logging.getLogger(__name__)


class _Names(type):
    """Metaclass that makes every upper-case attribute a backend's canonical name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_") or not name.isupper():
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}; names of backends are in upper case here")
        return get_registry().canonical(name)


class DistributedType(metaclass=_Names):
    """Names of backends as attributes: ``accelerator.distributed_type == DistributedType.MULTI_GPU``."""


def from_plugins(name: str) -> Any:
    """The object that an installed plugin gives this name.

    Raises:
        AttributeError: no installed plugin provides it.
        AbsentNameError: no installed plugin provides it, but one that is not installed might.
        BackendConflictError: two backends provide it.
        BackendBrokenError: its import failed.
    """
    registry = get_registry()
    found: list[tuple[str, str]] = []
    for backend in registry.names():
        try:
            names = registry.info(backend).names
        except BackendError as error:
            logger.debug("backend %s: %s", backend, error)
            continue
        if name in names:
            found.append((registry.owner(backend), names[name]))
    missing = sorted(set(known_extras()) - set(registry.names()))
    if not found and name.endswith("Plugin") and missing:
        raise AbsentNameError(
            f"no installed backend brings the name {name!r}",
            cure=f"Install the one that does: {pip_line('NAME')}, NAME one of {listed(missing)}.",
        )
    if not found:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    if len(found) > 1:
        raise BackendConflictError(
            f"two backends bring the name {name!r}: {found[0][0]} and {found[1][0]}", cure="Uninstall one of the two."
        )
    owner, target = found[0]
    return import_object(target, owner)

