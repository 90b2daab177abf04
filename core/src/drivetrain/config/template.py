"""Writes a configuration file with every key, its default and its description."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drivetrain.config.load import Backends, flag_paths
from drivetrain.config.locate import write
from drivetrain.config.schema import Config, Section
from drivetrain.errors import BackendError

Given = Mapping[tuple[str | int, ...], Any]
_WIDTH = 110
_HEAD = """\
# Configuration of drivetrain. Each key stands here with its default; delete what you do not change.
# Environment variables (DRIVETRAIN_MIXED_PRECISION=bf16, DRIVETRAIN_MESH__TP=2) speak louder than this file, and
# flags of `drivetrain launch` louder still; `drivetrain config show` says who set what.

"""
_CHOSEN = (
    "Configuration of drivetrain, written by `drivetrain config`. Keys that are not here have their defaults;",
    "`drivetrain config --default --config FILE` writes a file with all of them.",
)
_SECTIONS = """\
# Sections of the installed backends, one for each. Remove the marks before a section's name and before the keys that
# you change; the section of a backend that is not chosen is checked, and waits.
"""


def default_file(values: Mapping[str, Any] | None = None, registry: Backends | None = None) -> str:
    """The text of a commented YAML file; loading it gives the defaults, changed by ``values``.

    Args:
        values: by dotted key or nested, written instead of the defaults, sections of backends included.
        registry: of the backends; ``None`` = the process's registry.
    """
    if registry is None:
        from drivetrain.registry import get_registry

        registry = get_registry()
    given = dict(flag_paths(values or {}))
    parts = [_HEAD, *_model(Config, (), given)]
    sections = [_section(name, registry, given) for name in registry.names()]
    if any(sections):
        parts += ["\n", _SECTIONS, *sections]
    return "".join(parts)


def chosen_file(values: Mapping[str, Any], registry: Backends, remarks: Iterable[str] = ()) -> str:
    """The text of a YAML file that holds only ``values``, each with the sentence about its key above it.

    Args:
        values: by dotted key; keys of sections, those of backends included, are two words long.
        registry: of the backends.
        remarks: comment lines for the top of the file.
    """
    lines = [f"# {line}\n" for line in (*_CHOSEN, *remarks)]
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, inner = key.partition(".")
        if dot:
            sections.setdefault(section, {})[inner] = value
        else:
            lines += ["\n", *_entry(key, value, Config.model_fields[key], "")]
    for section, inside in sections.items():
        fields = _fields(section, registry)
        lines += [f"\n{section}:\n", *(line for key in inside for line in _entry(key, inside[key], fields[key], "  "))]
    return "".join(lines)


def _fields(section: str, registry: Backends) -> dict[str, FieldInfo]:
    """The fields of a section of the core or of a backend, by the name that stands in a file."""
    ours = Config.model_fields.get(section)
    model = registry.load_section(registry.info(section)) if ours is None else ours.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return {info.alias or key: info for key, info in model.model_fields.items()}


def _section(name: str, registry: Backends, given: Given) -> str:
    """The section of one backend, commented out but for the keys that were given."""
    try:
        model = registry.load_section(registry.info(name))
    except BackendError as error:
        return f"\n# {name}: its keys cannot be shown, {error.what.splitlines()[0]}\n"
    if model is None or not model.model_fields:
        return ""
    active = any(path[0] == name for path in given)
    lines = [f"{name}:\n"]
    for key, info in model.model_fields.items():
        path = (name, info.alias or key)
        set_here = any(each[:2] == path for each in given)
        value = _given(path, given) if set_here else _default(info)
        lines += _entry(path[1], value, info, "  ", commented=active and not set_here)
    return "".join(["\n", *(lines if active else (f"# {line}" for line in lines))])


def _given(path: tuple[str, str], given: Given) -> Any:
    """The value given for a key of a section; dotted keys below it are nested again."""
    if path in given:
        return given[path]
    nested: dict[str, Any] = {}
    for each, value in given.items():
        if each[:2] == path:
            here = nested
            for key in each[2:-1]:
                here = here.setdefault(str(key), {})
            here[str(each[-1])] = value
    return nested


def _model(model: type[BaseModel], prefix: tuple[str, ...], given: Given) -> Iterable[str]:
    indent = "  " * len(prefix)
    for key, info in model.model_fields.items():
        path = (*prefix, key)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield f"\n{indent}# {(info.annotation.__doc__ or '').strip().splitlines()[0]}\n{indent}{key}:\n"
            yield from _model(info.annotation, path, given)
        else:
            yield from _entry(key, given.get(path, _default(info)), info, indent)


def _entry(key: str, value: Any, info: FieldInfo, indent: str, *, commented: bool = False) -> list[str]:
    """The sentence about a key as comment lines, then the key with its value, which may be commented out too."""
    lead = f"{indent}# "
    comment = textwrap.wrap(info.description or "", _WIDTH, initial_indent=lead, subsequent_indent=lead)
    return [f"{line}\n" for line in (*comment, f"{lead if commented else indent}{key}: {write(value)}")]


def _default(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return None
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return value
