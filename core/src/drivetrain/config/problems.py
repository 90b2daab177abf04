"""Turns pydantic's validation errors into messages with line, column and a suggestion."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from drivetrain.config.keys import CORE_KEYS
from drivetrain.config.locate import Path, Problem, Tree
from drivetrain.errors import BackendError
from drivetrain.wording import closest, cut

if TYPE_CHECKING:
    from drivetrain.registry import Registry

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "keys and values",
    "model": "keys and values",
    "none": "null",
}
"""Expected values by the first word of a pydantic error type."""

MOST_PROBLEMS = 100
"""Maximum number of reported mistakes; a file with more is probably not a configuration."""

_JUDGED = ("value_error", "assertion_error")
"""Types of what a validator raises itself."""

_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def suggest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or an empty string when no known word is close."""
    names = list(known)
    guess = closest(word, names)
    if guess is None and len(word) >= 4:
        holding = [name for name in names if word.lower() in name.lower()]
        guess = holding[0] if len(holding) == 1 else None
    return f"; did you mean '{guess}'?" if guess is not None else ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence about an unknown key."""
    names = sorted(known)
    rest = suggest(key, names) or (f"; the keys here are {', '.join(names)}" if names else "; no key fits here")
    return f"unknown key '{cut(key, 60)}'{rest}"


def unknown_top_key(key: str, registry: Registry) -> str:
    """The sentence about an unknown key outside of all sections; it may belong into one."""
    sections = []
    for name in registry.names():
        try:
            model = registry.load_section(registry.info(name))
        except BackendError:  # a broken plugin is reported where it is chosen, or where its section stands
            continue
        if model is not None and key in known_keys(model):
            sections.append(f"'{name}:'")
    if sections:
        places = f"the section {sections[0]}" if len(sections) == 1 else f"one of the sections {', '.join(sections)}"
        return f"unknown key '{key}' outside of a section; it belongs into {places}"
    guess = suggest(key, {*CORE_KEYS, *registry.names()})
    return f"unknown key '{cut(key, 60)}'{guess or '; `drivetrain config --default` writes a file with every key'}"


def show(value: Any) -> str:
    """A value as it would be written in a file, cut when long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value[:61] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def model_problems(error: ValidationError, model: type[BaseModel], prefix: Path, tree: Tree) -> list[Problem]:
    """One problem per location of pydantic's errors.

    Args:
        error: what validation raised.
        model: the model that was validated.
        prefix: where its values sit in the whole tree.
        tree: where each key and value was written.
    """
    found: dict[Path, list[ErrorDetails]] = {}
    for details in islice(error.errors(include_url=False), MOST_PROBLEMS + 1):
        found.setdefault((*prefix, *_known_part(details["loc"], prefix, tree)), []).append(details)
    problems = []
    for path, errors in found.items():
        said = _joined(list(dict.fromkeys(_sentence(each, model) for each in errors)))
        if any(each["type"] == "extra_forbidden" for each in errors):
            problems.append(Problem(tree.key(path), said))
            continue
        origin = tree.origin(path)
        # The origin of a variable or a flag names the key already; that of a file does not.
        said = f"{'.'.join(map(str, path))}: {said}" if origin.kind == "file" else said
        problems.append(Problem(origin, said, judged=all(each["type"] in _JUDGED for each in errors)))
    return problems


def _joined(sentences: list[str]) -> str:
    """Join the errors of a union's alternatives for one value: ``expected a, or b, not c``."""
    split = [each.removeprefix("expected ").split(", not ") for each in sentences]
    if all(each.startswith("expected ") for each in sentences) and len({part[-1] for part in split}) == 1:
        wanted = " or ".join(", not ".join(part[:-1]) for part in split)
        return f"expected {wanted}, not {split[0][-1]}" if len(split[0]) > 1 else "; ".join(sentences)
    return "; ".join(sentences)


def _known_part(loc: tuple[int | str, ...], prefix: Path, tree: Tree) -> Path:
    """The longest beginning of ``loc`` that is a place in the tree; pydantic appends the names of union members."""
    lengths = (length for length in range(len(loc), 0, -1) if (*prefix, *loc[:length]) in tree.origins)
    return loc[: next(lengths, 1)]


def _sentence(details: ErrorDetails, model: type[BaseModel]) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    name = str(details["loc"][-1]) if details["loc"] else ""
    if kind == "extra_forbidden":
        return unknown_key(name, known_keys(model, details["loc"][:-1]))
    if kind == "missing":
        return f"the key '{name}' is missing"
    if kind == "finite_number":
        return f"expected a finite number, not {show(value)}"
    if kind in ("literal_error", "enum"):
        wanted = context.get("expected", "another value")
        words = wanted.replace("'", "").replace(" or ", ", ").split(", ")
        return f"expected {wanted}, not {show(value)}" + (suggest(value, words) if isinstance(value, str) else "")
    if kind in _LIMITS:
        word, key = _LIMITS[kind]
        # pydantic before 2.11 turns limits into floats.
        return f"expected {word} {_number(context.get(key))}, not {show(value)}"
    if kind in _JUDGED:
        return str(context.get("error", details["msg"])).rstrip(".")
    family, _, rest = kind.partition("_")
    if family in _EXPECTED and rest in ("type", "parsing", "from_float", "parsing_size", "attributes_type"):
        quotes = "; put it in quotes" if family == "string" and isinstance(value, (int, float)) else ""
        return f"expected {_EXPECTED[family]}, not {show(value)}{quotes}"
    return details["msg"][:1].lower() + details["msg"][1:].rstrip(".")


def _number(limit: Any) -> str:
    """A limit as it was written: 0, not 0.0."""
    return str(int(limit)) if isinstance(limit, float) and limit.is_integer() else str(limit)


# ---- pydantic models ------------------------------------------------------------------------------------------------


def _members(annotation: Any) -> list[Any]:
    """The plain types of an annotation: unions and ``Annotated`` are opened, ``None`` is left out."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [plain for each in get_args(annotation) for plain in _members(each)]
    return [] if annotation is type(None) else [annotation]


def _field(model: type[BaseModel], key: str) -> FieldInfo | None:
    return next((info for name, info in model.model_fields.items() if key in (name, info.alias)), None)


def _models(infos: Iterable[FieldInfo | None]) -> list[type[BaseModel]]:
    """The models among the types of fields."""
    members = (plain for info in infos if info is not None for plain in _members(info.annotation))
    return [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]


def _submodels(model: type[BaseModel], path: Iterable[int | str]) -> list[type[BaseModel]]:
    """The models that describe the mapping at ``path`` below ``model``; none when it is free-form."""
    found = [model]
    for key in path:
        found = _models(_field(one, str(key)) for one in found)
    return found


def known_keys(model: type[BaseModel], path: Iterable[int | str] = ()) -> list[str]:
    """Return the keys that are valid at ``path`` below ``model``."""
    return sorted({info.alias or name for one in _submodels(model, path) for name, info in one.model_fields.items()})


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


_WORDS = {False: ("no", "off", "false", "n"), True: ("yes", "on", "true", "y")}


def spell_out(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Restore ``no`` in fields that accept it as text, where YAML 1.1 made a boolean of it."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        info = _field(model, key)
        members = _members(info.annotation) if info is not None else []
        inner = _models([info])
        if isinstance(value, Mapping) and inner:
            result[key] = spell_out(inner[0], value)
        elif isinstance(value, bool) and bool not in members:
            choices = [choice for each in members for choice in _choices(each)]
            result[key] = next((word for word in _WORDS[value] if word in choices), value)
        else:
            result[key] = value
    return result


def wants_text(model: type[BaseModel], path: Path, text: str) -> bool:
    """Whether a value of an environment variable or flag is text instead of YAML."""
    for one in _submodels(model, path[:-1]):
        info = _field(one, str(path[-1]))
        for plain in _members(info.annotation) if info is not None else ():
            if (isinstance(plain, type) and issubclass(plain, str)) or text in _choices(plain):
                return True
    return False
