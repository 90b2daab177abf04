"""Refuses ``load_state_dict(assign=True)`` on models whose parameters an engine holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from drivetrain.api import UnsupportedError


def refuse_assignment(metadata: Mapping[str, Any], engine: str) -> None:
    """Raise where ``load_state_dict`` of a module was called with ``assign=True``.

    Args:
        metadata: that ``load_state_dict`` gives to each module.
        engine: what does what with parameters, as the end of "those that ...".
    """
    if metadata.get("assign_to_params_buffers"):
        raise UnsupportedError(
            f"load_state_dict(assign=True) would put other parameters in the place of those that {engine}",
            cure="Call load_state_dict without assign=True, on every rank.",
        )


@final
class AssignmentRefusal:
    """Raises in ``load_state_dict(assign=True)`` of a module or of any part of it, before anything is loaded.

    torch would register other parameters one by one, collect what each registration raises, and end with a list.

    Args:
        module: prepared.
        engine: as in :func:`refuse_assignment`.
    """

    def __init__(self, module: nn.Module, engine: str) -> None:
        self._engine = engine
        self._handles = [part.register_load_state_dict_pre_hook(self._check) for part in module.modules()]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Let the module load as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _check(self, *args: Any) -> None:
        _module, _state, _prefix, metadata, *_ = args
        refuse_assignment(metadata, self._engine)
