"""Writes a configuration file with every key, its default and its description."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drivetrain.config.locate import write
from drivetrain.config.schema import Config
from drivetrain.errors import BackendError

if TYPE_CHECKING:
    from drivetrain.registry import Registry

_WIDTH = 110
_HEAD = """\
# Configuration of drivetrain. Each key stands here with its default; delete what you do not change.
# Environment variables (DRIVETRAIN_MIXED_PRECISION=bf16, DRIVETRAIN_MESH__TP=2) override this file, and flags
# of `drivetrain launch` override both; `drivetrain config show` prints where each value comes from.

"""
_CHOSEN = (
    "Configuration of drivetrain, written by `drivetrain config`. Keys that are not here have their defaults;",
    "`drivetrain config --default --config FILE` writes a file with all of them.",
)
_SECTIONS = """\
# Sections of the installed backends, one for each. Remove the marks before a section's name and before the keys that
# you change; the section of a backend that is not chosen is checked, and waits.
"""


def default_file(registry: Registry | None = None) -> str:
    """The text of a commented YAML file; loading it gives the defaults.

    Args:
        registry: of the backends; ``None`` = the process's registry.
    """
    if registry is None:
        from drivetrain.registry import get_registry

        registry = get_registry()
    parts = [_HEAD]
    for key, info in Config.model_fields.items():
        if key in sections():
            assert info.annotation is not None
            about = (info.annotation.__doc__ or "").strip().splitlines()[0]
            parts.append(f"\n# {about}\n{section_text(key, registry)}")
        else:
            parts += _entry(key, _default(info), info, "")
    backends = [_waiting(name, registry) for name in registry.names()]
    return "".join([*parts, "\n", _SECTIONS, *backends] if any(backends) else parts)


def _waiting(name: str, registry: Registry) -> str:
    """The section of a backend as comments; nothing where it has no keys."""
    try:
        if not _fields(name, registry):
            return ""
        return "\n" + textwrap.indent(section_text(name, registry), "# ")
    except BackendError as error:
        return f"\n# {name}: its keys cannot be shown, {error.what.splitlines()[0]}\n"


def chosen_file(values: Mapping[str, Any], registry: Registry, remarks: Iterable[str] = ()) -> str:
    """The text of a YAML file that holds only ``values``, each with the sentence about its key above it.

    Args:
        values: by dotted key; keys of sections, those of backends included, are two words long.
        registry: of the backends.
        remarks: comment lines for the top of the file.
    """
    lines = [f"# {line}\n" for line in (*_CHOSEN, *remarks)]
    inside: dict[str, list[str]] = {}
    for key, value in values.items():
        section, dot, inner = key.partition(".")
        if dot:
            inside.setdefault(section, []).extend(_entry(inner, value, _fields(section, registry)[inner], "  "))
        else:
            lines += ["\n", *_entry(key, value, Config.model_fields[key], "")]
    for section, entries in inside.items():
        lines += [f"\n{section}:\n", *entries]
    return "".join(lines)


def section_text(section: str, registry: Registry) -> str:
    """A section of the core or of a backend with every key, its default and its description, as in a file.

    Raises:
        BackendError: neither the core nor an installed backend has a section of this name.
    """
    name = section if section in sections() else registry.resolve(section)
    entries = [_entry(key, _default(info), info, "  ") for key, info in _fields(name, registry).items()]
    if not entries:
        return f"# {name} has no keys.\n"
    return "".join([f"{name}:\n", *(line for entry in entries for line in entry)])


def sections() -> tuple[str, ...]:
    """Names of the core's sections."""
    kinds = ((key, info.annotation) for key, info in Config.model_fields.items())
    return tuple(key for key, kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def _fields(section: str, registry: Registry) -> dict[str, FieldInfo]:
    """Return the fields of a section of the core or of a backend, by their name in a file."""
    ours = Config.model_fields.get(section)
    model: Any = registry.load_section(registry.info(section)) if ours is None else ours.annotation
    return {} if model is None else {info.alias or key: info for key, info in model.model_fields.items()}


def _entry(key: str, value: Any, info: FieldInfo, indent: str) -> list[str]:
    """The sentence about a key as comment lines, then the key with its value."""
    lead = f"{indent}# "
    comment = textwrap.wrap(info.description or "", _WIDTH, initial_indent=lead, subsequent_indent=lead)
    return [f"{line}\n" for line in (*comment, f"{indent}{key}: {write(value)}")]


def _default(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return None
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return value
