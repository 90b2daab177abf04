"""Converts logged values to plain numbers, text, lists and mappings, without importing any tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.api.programs import json_value


def number(value: Any) -> Any:
    """A tensor or array of one element as a number; everything else plain."""
    if isinstance(value, (int, float)):
        return value
    simple = json_value(value)
    while isinstance(simple, list) and len(simple) == 1:
        simple = simple[0]
    # `json_value` writes these as text for JSON; trackers plot them.
    return float(simple) if simple in ("nan", "inf", "-inf") else simple


def without_tensors(value: Any) -> Any:
    """Tensors and arrays, also inside of lists and mappings, as numbers and lists; everything else as it is."""
    if isinstance(value, Mapping):
        return {key: without_tensors(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_tensors(each) for each in value]
    return value.tolist() if _is_array(value) else value


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nested mappings as one, their keys joined by the separator."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}{separator}{name}": each for name, each in flat(value, separator).items()}
        else:
            found[str(key)] = value
    return found


def _is_array(value: Any) -> bool:
    return callable(getattr(value, "tolist", None))
