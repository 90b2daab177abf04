"""Refuses attributes written after ``prepare`` on a model that Megatron-Core runs, where they would have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

_HARMLESS = frozenset({"training", "generation_config", "name_or_path", "warnings_issued"})
"""Attributes that no forward reads."""


@final
class AttributeWatch:
    """Refuses writes to attributes that a module had when it was prepared.

    Args:
        module: the user's; each module in it gets a class of its own, derived from its class.
        refused: makes the error, given what was done.
    """

    def __init__(self, module: nn.Module, refused: Callable[[str], Exception]) -> None:
        self._changed: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
        for part in module.modules():
            original = type(part)
            part.__class__ = made = self._class_for(original, refused)
            self._changed.append((part, original, made))

    def _class_for(self, original: type[nn.Module], refused: Callable[[str], Exception]) -> type[nn.Module]:
        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            known = name in vars(module) and not name.startswith("_") and name not in _HARMLESS
            if known and not isinstance(value, (nn.Module, Tensor)) and not _same(vars(module)[name], value):
                raise refused(f"{name!r} of {original.__name__} was written after prepare")
            original.__setattr__(module, name, value)

        made = type(original.__name__, (original,), {"__setattr__": set_attribute, "__module__": original.__module__})
        made.__qualname__ = original.__qualname__
        return made

    def remove(self) -> None:
        """Give every module its class back. May be called twice."""
        for part, original, made in self._changed:
            if type(part) is made:
                part.__class__ = original
        self._changed.clear()


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | bool) and one == other)
