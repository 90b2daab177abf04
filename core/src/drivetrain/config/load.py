"""Load a configuration: defaults < file < environment < flags; every mistake is found before one error is raised."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from pydantic import BaseModel, ValidationError

from drivetrain.compat.config_files import judge_key
from drivetrain.compat.config_rules import Rule, Verdict
from drivetrain.config.keys import CORE_KEYS, may_be_foreign
from drivetrain.config.locate import DEFAULT, Document, Origin, Path, Problem, locate, parse_scalar, read_file
from drivetrain.config.problems import MOST_PROBLEMS, model_problems, show, spell_out, suggest, unknown_key, wants_text
from drivetrain.config.resolved import ResolvedConfig, check_section, leaves, mistakes
from drivetrain.config.schema import Config
from drivetrain.errors import BackendError, BackendNotFoundError

if TYPE_CHECKING:
    from drivetrain.backend import BackendInfo

# ---- Layers

PREFIX = "DRIVETRAIN_"

OTHER_VARIABLES = frozenset({"CONFIG", "CONFIG_FILE", "INIT_METHOD", "LAUNCHER", "LOG_LEVEL", "TRACE_HOOKS"})
"""Variables with our prefix that are no configuration keys."""

_INTERNAL = re.compile(r"^(INTERNAL|TEST|TESTING)?_")
_SERVICE = re.compile(r"_?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP)(_.*)?)$")
"""What Kubernetes sets in every container beside a service that happens to be called drivetrain."""


@dataclass
class Tree:
    """Values of all layers so far, each leaf with the layer that set it last.

    Args:
        values: nested values.
        origins: where each value, and each mapping on the way to it, came from.
        keys: where each key of the file stands.
        problems: mistakes found so far.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    keys: dict[Path, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: Path, value: Any, origin: Origin) -> None:
        """Set one value; a value on the path of a nested key is replaced by a mapping."""
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
    """The first layer: the file's values."""
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
    """Merge environment or flags into the tree.

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


# ---- Loading

CONFIG_VARIABLE = "DRIVETRAIN_CONFIG"
"""A whole resolved configuration as JSON: how the launcher speaks to its workers."""

FILE_VARIABLE = "DRIVETRAIN_CONFIG_FILE"
"""The file to read when none is named."""

_MISSING = object()

_REFERENCE = re.compile(r"\$\{[^}]*\}|\$[A-Z_][A-Z_0-9]+")
"""What a shell or another tool's files would fill in: ``${HOME}``, ``$HOME``."""


class Backends(Protocol):
    """The part of :class:`drivetrain.registry.Registry` that loading uses."""

    def resolve(self, name: str) -> str: ...
    def info(self, name: str) -> BackendInfo: ...
    def load_section(self, info: BackendInfo) -> type[BaseModel] | None: ...
    def names(self) -> tuple[str, ...]: ...
    def import_rules(self) -> Mapping[str, Mapping[str, Rule]]: ...


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    registry: Backends | None = None,
) -> ResolvedConfig:
    """Read a file, then override its values by environment variables and flags.

    Args:
        path: a YAML file; ``None`` reads the one that ``DRIVETRAIN_CONFIG_FILE`` names, or none.
        overrides: values of flags by dotted key (``{"mesh.tp": 2}`` or nested); text is read as YAML would read it,
            ``None`` means that the flag was not given.
        environ: the environment; ``None`` = this process's. ``DRIVETRAIN_MESH__TP=2`` sets ``mesh.tp``.
        registry: of the backends; ``None`` = the process's registry.

    Raises:
        ConfigError: all mistakes at once, each with file, line and column (or variable, or flag).
        BackendError: ``distributed_type`` names a backend that is not there, broken, or claimed twice.
    """
    environ = os.environ if environ is None else environ
    path = path if path is not None else environ.get(FILE_VARIABLE) or None
    tree = Tree() if path is None else tree_of(locate(read_file(path), os.fspath(path)))
    return _Loading(tree, registry).run(environ, overrides or {})


def worker_config(environ: Mapping[str, str] | None = None, *, registry: Backends | None = None) -> ResolvedConfig:
    """The configuration of a training process: the launcher's, else a file's, else defaults.

    Environment variables override it, except where a flag of the launcher set the value.

    Args:
        environ: the environment; ``None`` = this process's.
        registry: as in :func:`load_config`.

    Raises:
        ConfigError, BackendError: as :func:`load_config`.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(CONFIG_VARIABLE)
    if not text:
        return load_config(environ=environ, registry=registry)
    handed = ResolvedConfig.from_json(text)
    if not environment_paths(environ):
        return handed
    values: dict[str, Any] = {**handed.config.model_dump(exclude_unset=True), **handed.sections}
    given = handed.places()
    tree = Tree(values, dict(given), dict(given))
    flags = {path for path, origin in given.items() if origin.kind == "flag"}
    return _Loading(tree, registry, mentioned=True).run(environ, {}, settled=flags)


class _Loading:
    """Loads all layers and collects mistakes."""

    def __init__(self, tree: Tree, registry: Backends | None, *, mentioned: bool = False) -> None:
        self.tree = tree
        self._mentioned = mentioned  # the launcher has warned of what does not stop the run
        self.problems = tree.problems
        self._registry = registry
        self._models: dict[str, type[BaseModel] | None] = {}

    @property
    def registry(self) -> Backends:
        """Looked up when a backend is first mentioned: a file without sections needs no plugin."""
        if self._registry is None:
            from drivetrain.registry import get_registry

            self._registry = get_registry()
        return self._registry

    def run(
        self, environ: Mapping[str, str], overrides: Mapping[str, Any], settled: AbstractSet[Path] = frozenset()
    ) -> ResolvedConfig:
        """Merge the layers, validate, and raise or return. The environment does not override paths in ``settled``."""
        self._import()
        lay(self.tree, self._environment(environ, settled), self._is_text)
        flags = ((path, value, Origin("flag", ".".join(map(str, path)))) for path, value in flag_paths(overrides))
        lay(self.tree, flags, self._is_text)
        self._mention_references()
        core, sections = self._split()
        config = self._core(core)
        checked: dict[str, dict[str, Any]] = {}
        for section, values in sections.items():
            if len(self.problems) > MOST_PROBLEMS:
                break
            if self._section(section, values):
                checked[section] = self._spelled(section, values)
        try:
            name = self._backend(core)
        except BackendError as error:
            for problem in sorted(self.problems, key=lambda each: each.origin):
                error.add_note(str(problem))
            raise
        if self.problems or config is None:
            raise mistakes(self.problems)
        if name is not None:
            config = config.model_copy(update={"distributed_type": name})
        return ResolvedConfig(config, checked, self._origins(config, checked))

    def _import(self) -> None:
        """Convert Accelerate's own keys to ours, each with the origin of the key that it came from."""
        file = dict(self.tree.values)
        for key in filter(may_be_foreign, file):
            for verdict in judge_key(key, self.tree.values.pop(key), file, self.registry):
                path = tuple(verdict.key.split("."))
                if verdict.pile == "not supported":
                    self._follow(path, verdict)
                for ours, value in (verdict.carried or {}).items():
                    self._carry(verdict.key, ours, value)

    def _follow(self, path: Path, verdict: Verdict) -> None:
        """Apply a conversion; an unsupported key is an error where results would change, else a warning."""
        shown = "" if isinstance(verdict.value, (dict, list)) else f": {show(verdict.value)}"
        sentence = f"{verdict.key}{shown} is not supported; {verdict.says}"
        if verdict.stops:
            self.problems.append(Problem(self._at(path), sentence))
        else:
            warnings.warn(f"{self._at(path)}: {sentence}; the run goes on without it.", UserWarning, stacklevel=5)

    def _carry(self, theirs: str, key: str, value: Any) -> None:
        """Set one of our keys, unless the file sets it itself."""
        path, ours = tuple(theirs.split(".")), tuple(key.split("."))
        there: Any = self.tree.values
        for part in ours:
            there = there.get(part, _MISSING) if isinstance(there, dict) else _MISSING
        if there is _MISSING:
            self.tree.put(ours, value, self._at(path))
            self.tree.keys[ours] = self.tree.keys.get(path) or self._at(path)
        elif there != value:
            both = f"{theirs} means {key}: {show(value)}, and the file says {show(there)} there"
            self._complain(path, f"{both}; keep one of the two")

    def _mention_references(self) -> None:
        """Warn that references such as ``${HOME}`` in values are not expanded."""
        for path, value in () if self._mentioned else leaves(self.tree.values):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and _REFERENCE.search(text):
                    key, variable = ".".join(path), f"{PREFIX}{'__'.join(path).upper()}"
                    instead = f"write the value itself, or set {variable} in a shell, which fills them in"
                    said = f"{self._at(path)}: {key}: variables in {show(text)} are not filled in; {instead}"
                    warnings.warn(f"{said}.", UserWarning, stacklevel=4)

    # ---- layers -------------------------------------------------------------------------------------------------

    def _environment(self, environ: Mapping[str, str], settled: AbstractSet[Path]) -> list[tuple[Path, str, Origin]]:
        entries: list[tuple[Path, str, Origin]] = []
        for name, path in environment_paths(environ).items():
            origin = Origin("environment", name)
            if str(path[0]) not in CORE_KEYS and not (len(path) > 1 and self._knows(str(path[0]))):
                self._unknown_variable(origin, str(path[0]))
            elif path not in settled:
                entries.append((path, environ[name], origin))
        return entries

    def _unknown_variable(self, origin: Origin, key: str) -> None:
        """A variable similar to one of ours is a mistake; any other may be another program's and only warns."""
        known = {*CORE_KEYS, *self.registry.names()}
        sentence = unknown_variable(key, known)
        if suggest(key, known):
            self.problems.append(Problem(origin, sentence))
        else:
            warnings.warn(f"{origin} is not read: {sentence}.", UserWarning, stacklevel=5)

    def _knows(self, name: str) -> bool:
        try:
            return self.registry.resolve(name) == name
        except BackendNotFoundError:
            return False
        except BackendError:
            return True

    def _is_text(self, path: Path, text: str) -> bool:
        key = str(path[0])
        if key in CORE_KEYS:
            return wants_text(Config, path, text)
        model = self._model(key) if len(path) > 1 and self._knows(key) else None
        return model is not None and wants_text(model, path[1:], text)

    # ---- validation ---------------------------------------------------------------------------------------------

    def _split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separate the core's keys from the rest, which are sections of backends or mistakes."""
        core: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for key, value in self.tree.values.items():
            if key in CORE_KEYS:
                if value is not None:
                    core[key] = _without_null(value)
            else:
                rest[key] = value
        return core, rest

    def _core(self, values: dict[str, Any]) -> Config | None:
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            self.problems += model_problems(error, Config, (), self.tree.origins, self.tree.keys)
            return None

    def _section(self, name: str, values: Any) -> bool:
        """Validate one key that is not the core's; returns whether it is the section of an installed backend."""
        try:
            canonical = self.registry.resolve(name)
            if canonical != name:
                self._complain((name,), f"the section of this backend is called '{canonical}', not '{name}'")
                return False
            model = self._model(name)
        except BackendNotFoundError as error:
            self._complain((name,), self._stranger(name, error))
            return False
        except BackendError as error:
            self._complain((name,), f"this section cannot be checked: {error}".rstrip("."))
            return False
        if values is None:
            self.tree.values[name] = values = {}
        if not isinstance(values, dict):
            sentence = "expected keys and values, as this is the section of a backend"
            self.problems.append(Problem(self._at((name,)), f"{name}: {sentence}"))
        elif model is None and values:
            self._complain((name, next(iter(values))), f"backend '{name}' has no settings of its own; remove its keys")
        elif model is not None:
            for problem in check_section(model, name, values, self.tree.origins, self.tree.keys)[1]:
                self._judge(name, problem)
        return bool(values)

    def _judge(self, name: str, problem: Problem) -> None:
        """Report a section's problem; that of a backend that is not chosen only warns: its files may be absent here."""
        if not (problem.judged and self._is_idle(name)):
            self.problems.append(problem)
        elif not self._mentioned:
            chosen = f"distributed_type is not {name}, and the run goes on"
            warnings.warn(f"{problem}; {chosen}.", UserWarning, stacklevel=5)

    def _is_idle(self, name: str) -> bool:
        """Whether another backend than this one is chosen."""
        chosen = self.tree.values.get("distributed_type")
        try:
            return chosen is not None and self.registry.resolve("no" if chosen is False else str(chosen)) != name
        except BackendError:
            return False  # reported at its place in the file

    def _spelled(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        model = self._model(name)
        return values if model is None or not isinstance(values, dict) else spell_out(model, values)

    def _stranger(self, name: str, error: BackendNotFoundError) -> str:
        """A key that is neither the core's nor an installed backend's: a backend to install, or a typing error."""
        if "pip install" in error.cure and "Did you mean" not in error.cure:
            return f"{error}".rstrip(".")
        return unknown_key(name, {*CORE_KEYS, *self.registry.names()})

    def _backend(self, core: Mapping[str, Any]) -> str | None:
        """The canonical name of the chosen backend. The registry's own errors propagate, with the origin as a note."""
        written = core.get("distributed_type")
        name = "no" if written is False else written
        if not isinstance(name, str):
            return None
        try:
            return self.registry.resolve(name)
        except BackendError as error:
            error.add_note(f"distributed_type was set by {self._at(('distributed_type',))}")
            raise

    def _model(self, name: str) -> type[BaseModel] | None:
        if name not in self._models:
            self._models[name] = self.registry.load_section(self.registry.info(name))
        return self._models[name]

    # ---- origins ------------------------------------------------------------------------------------------------

    def _at(self, path: Path) -> Origin:
        return self.tree.origin(path) or DEFAULT

    def _complain(self, path: Path, sentence: str) -> None:
        self.problems.append(Problem(self.tree.keys.get(path) or self._at(path), sentence))

    def _origins(self, config: Config, sections: Mapping[str, dict[str, Any]]) -> dict[str, Origin]:
        paths = [path for path, _ in leaves(config)] + [path for path, _ in leaves(sections) if len(path) > 1]
        return {".".join(path): self.tree.origins[path] for path in paths if path in self.tree.origins}


def _without_null(value: Any) -> Any:
    """In the core a null means the default, as in the files that Accelerate writes."""
    if not isinstance(value, dict):
        return value
    return {key: _without_null(each) for key, each in value.items() if each is not None}

