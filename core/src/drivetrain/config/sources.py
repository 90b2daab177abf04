"""The layers of a configuration and how they are laid over each other: file, then environment, then flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from drivetrain.config.locate import Document, Path, Problem, parse_scalar
from drivetrain.config.origin import Origin
from drivetrain.config.problems import show, suggest

PREFIX = "DRIVETRAIN_"

OTHER_VARIABLES = frozenset({"CONFIG", "CONFIG_FILE", "INIT_METHOD", "LAUNCHER", "LOG_LEVEL", "TRACE_HOOKS"})
"""Variables with our prefix that are no configuration keys."""

_INTERNAL = re.compile(r"^(INTERNAL|TEST|TESTING)?_")
_SERVICE = re.compile(r"_?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP)(_.*)?)$")
"""What Kubernetes sets in every container beside a service that happens to be called drivetrain."""


@dataclass
class Tree:
    """Values of all layers so far, each leaf with the layer that said it last.

    Args:
        values: nested values.
        origins: where each value, and each mapping on the way to it, came from.
        keys: where each key of the file stands.
        problems: mistakes met on the way.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    keys: dict[Path, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: Path, value: Any, origin: Origin) -> None:
        """Lay one value over what is there; a mapping that stood in the way of a nested key makes room."""
        here = self.values
        for depth, key in enumerate(path[:-1], start=1):
            below = here.get(str(key))
            if not isinstance(below, dict):
                below = here[str(key)] = {}
            self.origins.setdefault(path[:depth], origin)
            here = below
        for old in [each for each in self.origins if each[: len(path)] == path]:
            del self.origins[old]
        here[str(path[-1])] = value
        self.origins[path] = origin

    def origin(self, path: Path) -> Origin | None:
        """Where the value at this place, or the value that holds it, came from."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None


def tree_of(document: Document) -> Tree:
    """The first layer: what the file says."""
    return Tree(document.values, dict(document.places), dict(document.keys), list(document.problems))


def environment_paths(environ: Mapping[str, str]) -> dict[str, Path]:
    """Variables that may set a key, each with the key's path: ``DRIVETRAIN_MESH__TP`` is ``("mesh", "tp")``."""
    found: dict[str, Path] = {}
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in OTHER_VARIABLES or _INTERNAL.match(rest) or _SERVICE.fullmatch(rest):
            continue
        found[name] = tuple(part.lower() for part in rest.split("__"))
    return found


def flag_paths(overrides: Mapping[str, Any], prefix: Path = ()) -> Iterable[tuple[Path, Any]]:
    """Leaves of the flags, given as ``{"mesh.tp": 2}`` or ``{"mesh": {"tp": 2}}``; ``None`` means not given."""
    for name, value in overrides.items():
        path = (*prefix, *str(name).split("."))
        if isinstance(value, Mapping):
            yield from flag_paths(value, path)
        elif value is not None:
            yield path, value


def read_text(text: str, *, is_text: bool) -> Any:
    """Value of an environment variable or a flag: nothing, ``null`` and ``~`` are null; else text, or what YAML reads.

    Raises:
        ValueError: it looks like a list or a mapping and is not valid YAML.
    """
    stripped = text.strip()
    if stripped in ("", "null", "~"):
        return None
    if is_text:
        return text
    try:
        return parse_scalar(stripped)
    except yaml.YAMLError as error:
        raise ValueError(f"{show(text)} is not a valid value") from error


def lay(tree: Tree, entries: Iterable[tuple[Path, Any, Origin]], is_text: Callable[[Path, str], bool]) -> None:
    """Lay environment or flags over the tree.

    Args:
        tree: changed in place.
        entries: path, value (text is read as :func:`read_text` says) and origin.
        is_text: whether the key at this path wants the text as it was written.
    """
    for path, said, origin in entries:
        try:
            value = read_text(said, is_text=is_text(path, said.strip())) if isinstance(said, str) else said
        except ValueError as error:
            tree.problems.append(Problem(origin, str(error)))
        else:
            tree.put(path, value, origin)


def unknown_variable(name: str, known: Iterable[str]) -> str:
    """The sentence about a variable with our prefix whose first word is no key."""
    return f"no such key{suggest(name, known) or '; `drivetrain config show` lists the keys'}"
