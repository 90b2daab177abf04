"""Names that installed plugins bring for scripts, so that ``from drivetrain.utils import X`` finds them. No torch."""

from __future__ import annotations

import logging
from typing import Any

from drivetrain.backend_checks import import_object
from drivetrain.errors import BackendConflictError, BackendError
from drivetrain.registry import get_registry

logger = logging.getLogger(__name__)


def brought(name: str) -> Any:
    """What the plugin that brings this name means by it.

    Raises:
        AttributeError: nobody installed brings it.
        BackendConflictError: two backends bring it.
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
    if not found:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    if len(found) > 1:
        raise BackendConflictError(
            f"two backends bring the name {name!r}: {found[0][0]} and {found[1][0]}", cure="Uninstall one of the two."
        )
    owner, target = found[0]
    return import_object(target, owner)
