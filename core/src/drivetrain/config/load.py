"""Loads a configuration: defaults < file < environment < flags; one error reports all mistakes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from drivetrain.config.accelerate_file import chosen_backend, is_idle, judge_key
from drivetrain.config.keys import AUTO, CORE_KEYS, may_be_foreign
from drivetrain.config.locate import Origin, Path, Problem, Tree, locate, parse_scalar, read_file
from drivetrain.config.problems import MOST_PROBLEMS, model_problems, show, spell_out, unknown_top_key, wants_text
from drivetrain.config.resolved import ResolvedConfig, check_section, leaves, mistakes
from drivetrain.config.schema import Config
from drivetrain.errors import BackendError, BackendNotFoundError
from drivetrain.wording import closest

if TYPE_CHECKING:
    from drivetrain.registry import Registry

# ---- Layers

PREFIX = "DRIVETRAIN_"

OTHER_VARIABLES = frozenset(
    {"CONFIG", "CONFIG_FILE", "INIT_METHOD", "LAUNCHER", "LOG_LEVEL", "RENDEZVOUS_TOKEN", "TRACE_HOOKS"}
)
"""Variables with our prefix that are no configuration keys."""

_INTERNAL = re.compile(r"^(INTERNAL|TEST|TESTING)?_")
_SERVICE = re.compile(r"_?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP)(_.*)?)$")
"""Variables that Kubernetes sets in every container if a service is named drivetrain."""


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


# ---- Loading

CONFIG_VARIABLE = "DRIVETRAIN_CONFIG"
"""Variable with the full resolved configuration as JSON, by which the launcher configures its workers."""

FILE_VARIABLE = "DRIVETRAIN_CONFIG_FILE"
"""The file to read when none is named."""

_MISSING = object()

_REFERENCE = re.compile(r"\$\{[^}]*\}|\$[A-Z_][A-Z_0-9]+")
"""Pattern of references that a shell or other tools would substitute: ``${HOME}``, ``$HOME``."""


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> ResolvedConfig:
    """Read a file, then override its values by environment variables and flags.

    Args:
        path: a YAML file; ``None`` reads the one that ``DRIVETRAIN_CONFIG_FILE`` names, or none.
        overrides: values of flags by dotted key (``{"mesh.tp": 2}`` or nested); text is read as YAML would read it,
            ``None`` means that the flag was not given.
        flags: how a message names the flag of a key, ``{"accelerator_ids": "--gpu_ids"}``; by its key if not here.
        environ: the environment; ``None`` = this process's. ``DRIVETRAIN_MESH__TP=2`` sets ``mesh.tp``.
        registry: of the backends; ``None`` = the process's registry.

    Raises:
        ConfigError: all mistakes at once, each with file, line and column (or variable, or flag).
        BackendError: ``distributed_type`` names a backend that is not there, broken, or claimed twice.
    """
    environ = os.environ if environ is None else environ
    path = path if path is not None else environ.get(FILE_VARIABLE) or None
    tree = Tree() if path is None else locate(read_file(path), os.fspath(path))
    return _Loading(tree, registry, flags or {}).run(environ, overrides or {})


def worker_config(environ: Mapping[str, str] | None = None, *, registry: Registry | None = None) -> ResolvedConfig:
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
    flags = {tuple(key.split(".")) for key, origin in handed.origins.items() if origin.kind == "flag"}
    return _Loading(handed.tree(), registry, {}, mentioned=True).run(environ, {}, settled=flags)


class _Loading:
    """Loads all layers and collects mistakes."""

    def __init__(
        self, tree: Tree, registry: Registry | None, flags: Mapping[str, str], *, mentioned: bool = False
    ) -> None:
        self.tree = tree
        self._flags = flags
        self._mentioned = mentioned  # the launcher has warned of what does not stop the run
        self.problems = tree.problems
        self._registry = registry

    @property
    def registry(self) -> Registry:
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
        self._lay(self._environment(environ, settled))
        self._lay((path, value, self._flag(path)) for path, value in flag_paths(overrides))
        self._mention_references()
        config = self._core({key: value for key, value in self.tree.values.items() if key in CORE_KEYS})
        checked: dict[str, dict[str, Any]] = {}
        for name in [key for key in self.tree.values if key not in CORE_KEYS]:
            if len(self.problems) > MOST_PROBLEMS:
                break
            section = self._section(name, self.tree.values[name])
            if section:
                checked[name] = section
        try:
            chosen = self._backend()
        except BackendError as error:
            for problem in sorted(self.problems, key=lambda each: each.origin):
                error.add_note(str(problem))
            raise
        if self.problems or config is None:
            raise mistakes(self.problems)
        if chosen is not None:
            config = config.model_copy(update={"distributed_type": chosen})
        paths = [path for path, _ in leaves(config)] + [path for path, _ in leaves(checked) if len(path) > 1]
        places = {".".join(path): self.tree.origins[path] for path in paths if path in self.tree.origins}
        return ResolvedConfig(config, checked, places)

    def _import(self) -> None:
        """Convert Accelerate's own keys to ours; one that is not supported is a mistake where results would change."""
        file = dict(self.tree.values)
        for key in filter(may_be_foreign, file):
            for verdict in judge_key(key, self.tree.values.pop(key), file, self.registry):
                for ours, value in (verdict.carried or {}).items():
                    self._carry(verdict.key, ours, value)
                if verdict.pile != "not supported":
                    continue
                origin = self.tree.origin(tuple(verdict.key.split(".")))
                shown = "" if isinstance(verdict.value, (dict, list)) else f": {show(verdict.value)}"
                sentence = f"{verdict.key}{shown} is not supported; {verdict.says}"
                if verdict.stops:
                    self.problems.append(Problem(origin, sentence))
                else:
                    warnings.warn(f"{origin}: {sentence}; the run goes on without it.", UserWarning, stacklevel=4)

    def _carry(self, theirs: str, key: str, value: Any) -> None:
        """Set one of our keys, unless the file sets it itself."""
        path, ours = tuple(theirs.split(".")), tuple(key.split("."))
        there: Any = self.tree.values
        for part in ours:
            there = there.get(part, _MISSING) if isinstance(there, dict) else _MISSING
        if there is _MISSING:
            self.tree.put(ours, value, self.tree.origin(path))
            self.tree.keys[ours] = self.tree.key(path)
        elif there != value:
            both = f"{theirs} means {key}: {show(value)}, and the file says {show(there)} there"
            self._complain(path, f"{both}; keep one of the two")

    def _flag(self, path: Path) -> Origin:
        key = ".".join(map(str, path))
        return Origin("flag", self._flags.get(key, key))

    def _mention_references(self) -> None:
        """Warn that references such as ``${HOME}`` in values are not expanded."""
        for path, value in () if self._mentioned else leaves(self.tree.values):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and _REFERENCE.search(text):
                    key, variable = ".".join(path), f"{PREFIX}{'__'.join(path).upper()}"
                    instead = f"write the value itself, or set {variable} in a shell, which fills them in"
                    said = f"{self.tree.origin(path)}: {key}: variables in {show(text)} are not filled in; {instead}"
                    warnings.warn(f"{said}.", UserWarning, stacklevel=4)

    # ---- layers -------------------------------------------------------------------------------------------------

    def _lay(self, entries: Iterable[tuple[Path, Any, Origin]]) -> None:
        """Merge environment or flags into the tree."""
        for path, value, origin in entries:
            try:
                self.tree.put(path, self._read(path, value) if isinstance(value, str) else value, origin)
            except yaml.YAMLError:
                self.problems.append(Problem(origin, f"{show(value)} is not a valid value"))

    def _read(self, path: Path, text: str) -> Any:
        """The value of a variable or flag: nothing, ``null`` and ``~`` are null; else text, or what YAML reads."""
        stripped = text.strip()
        if stripped in ("", "null", "~"):
            return None
        return text if self._is_text(path, stripped) else parse_scalar(stripped)

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
        guess = closest(key, {*CORE_KEYS, *self.registry.names()})
        if guess is not None:
            meant = str(origin.source).replace(key.upper(), guess.upper(), 1)
            self.problems.append(Problem(origin, f"no such key; did you mean {meant}?"))
        else:
            sentence = "no such key; `drivetrain config show` lists the keys"
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

    def _core(self, values: dict[str, Any]) -> Config | None:
        try:
            return Config.model_validate(_without_null(values))
        except ValidationError as error:
            self.problems += model_problems(error, Config, (), self.tree)
            return None

    def _section(self, name: str, values: Any) -> dict[str, Any]:
        """Validate one key that is not the core's; what it holds where it is the section of an installed backend."""
        try:
            canonical = self.registry.resolve(name)
            if canonical != name:
                self._complain((name,), f"the section of this backend is called '{canonical}', not '{name}'")
                return {}
            model = self._model(name)
        except BackendError as error:
            self._complain((name,), self._stranger(name, error))
            return {}
        values = {} if values is None else values
        if not isinstance(values, dict):
            sentence = f"{name}: expected keys and values, as this is the section of a backend"
            self.problems.append(Problem(self.tree.origin((name,)), sentence))
            return {}
        if model is None:
            if values:
                sentence = f"backend '{name}' has no settings of its own; remove its keys"
                self._complain((name, next(iter(values))), sentence)
            return values
        for problem in check_section(model, name, values, self.tree)[1]:
            self._judge(name, problem)
        return spell_out(model, values)

    def _judge(self, name: str, problem: Problem) -> None:
        """Report a section's problem; that of a backend that is not chosen only warns: its files may be absent here."""
        if not (problem.judged and is_idle(name, self.tree.values, self.registry)):
            self.problems.append(problem)
        elif not self._mentioned:
            chosen = f"distributed_type is not {name}, and the run goes on"
            warnings.warn(f"{problem}; {chosen}.", UserWarning, stacklevel=5)

    def _stranger(self, name: str, error: BackendError) -> str:
        """Describe a key of a broken or unknown backend: one to install, or a typing error."""
        if not isinstance(error, BackendNotFoundError):
            return f"this section cannot be checked: {error}".rstrip(".")
        if "pip install" in error.cure and "Did you mean" not in error.cure:
            return f"{error}".rstrip(".")
        return unknown_top_key(name, self.registry)

    def _backend(self) -> str | None:
        """The canonical name of the chosen backend. The registry's own errors propagate, with the origin as a note."""
        name = chosen_backend(self.tree.values)
        if name is None or name.lower() == AUTO:
            return name and AUTO
        try:
            return self.registry.resolve(name)
        except BackendError as error:
            error.add_note(f"distributed_type was set by {self.tree.origin(('distributed_type',))}")
            raise

    def _model(self, name: str) -> type[BaseModel] | None:
        return self.registry.load_section(self.registry.info(name))

    def _complain(self, path: Path, sentence: str) -> None:
        self.problems.append(Problem(self.tree.key(path), sentence))


def _without_null(value: Any) -> Any:
    """Replace null by the default, as in files that Accelerate writes."""
    if not isinstance(value, dict):
        return value
    return {key: _without_null(each) for key, each in value.items() if each is not None}
