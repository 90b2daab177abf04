"""Types of which the sections of a configuration are made, the core's and the plugins'. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base of every part of the configuration: unknown keys are mistakes, values cannot be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def not_bool(value: Any) -> Any:
    """Refuse a truth value: YAML reads ``yes`` and ``on`` as True, which would count as 1."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not {'true' if value else 'false'}")  # noqa: TRY004 - pydantic wants it
    return value


def names(value: Any) -> Any:
    """Split a text at its commas: one name, or several with commas between them, stand for a list."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


Integer = Annotated[int, BeforeValidator(not_bool)]
"""Integer, but no boolean."""

Number = Annotated[float, BeforeValidator(not_bool)]
"""A number; no truth value."""

Names = Annotated[tuple[str, ...], BeforeValidator(names)]
"""Names as a list, or as one text with commas between them."""
