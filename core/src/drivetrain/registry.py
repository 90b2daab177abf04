"""Finds, checks, loads and reports plugins; the only module that uses pluggy and entry points.

A module that an entry point of the group ``drivetrain`` names brings backends; one of the group ``drivetrain.hooks``
implements the hook that the entry point is named after. So a backend, or a hook, is found by its name, and no other
plugin is imported. All are imported only for an alias, a default or a listing. An error in one plugin is recorded with
its distribution and does not affect the others.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from drivetrain import hookspecs
from drivetrain.backend import CONTRACT, Backend, BackendInfo, Capabilities, Readiness
from drivetrain.config.keys import AUTO, CORE_KEYS, may_be_foreign
from drivetrain.errors import (
    AbsentNameError,
    BackendBlockedError,
    BackendBrokenError,
    BackendConflictError,
    BackendError,
    BackendNotFoundError,
    ContractMismatchError,
)
from drivetrain.hookspecs import GROUP, HOOK_GROUP
from drivetrain.wording import closest, did_you_mean, listed, sentences

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel
    from torch import nn

    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.launch.plan import LaunchPlan

CORE = "drivetrain"
"""Name of the core's own distribution; first-party plugins are ``drivetrain-<name>``."""

REPORT_IT = "Report this to its author."

_PREFIX = "drivetrain_"
_BACKENDS = "backends"
_EVENTS = tuple(
    name.removeprefix(_PREFIX)
    for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)
    if name.startswith(_PREFIX)
)
"""All hooks of this version, without the prefix."""

_logger = logging.getLogger("drivetrain.plugins")


@dataclass
class Plugin:
    """One module that entry points name, and the result of loading it.

    Args:
        name: the entry point's name; the distribution's, where the module brings hooks and no backend.
        value: the module.
        distribution: the distribution that brings it.
        version: of the distribution; empty when it is not installed but registered by a script.
        hooks: those that its entry points announce, without ``drivetrain_``; once loaded, those that it implements.
        loaded: an import was tried.
        module: what hooks were found on; ``None`` before loading, after a failure, and for a second entry point to one
            module.
        infos: the backends that it described.
        error: what went wrong, with its traceback.
        reason: one sentence about ``error``.
        cure: what to do about it.
    """

    name: str
    value: str
    distribution: str
    version: str
    hooks: set[str] = field(default_factory=set)
    loaded: bool = False
    module: object | None = None
    infos: tuple[BackendInfo, ...] = ()
    error: BaseException | None = None
    reason: str = ""
    cure: str = ""

    @cached_property
    def owner(self) -> str:
        """Distribution and version, as error messages name them."""
        return f"{self.distribution} {self.version}".strip()

    def fail(self, error: BaseException, what: str) -> None:
        """Record a failure."""
        self.module, self.infos, self.error = None, (), error
        self.reason = f"{what}: {type(error).__name__}: {error}" if str(error) else f"{what}: {type(error).__name__}"
        self.cure = sentences(core_mismatch(self.distribution), "`drivetrain backends --verbose` shows the traceback.")

    def check_loaded(self) -> None:
        """Raise :class:`BackendBrokenError`, caused by the original failure, when it could not be loaded."""
        if self.error is not None:
            raise BackendBrokenError(self.reason, whose=self.owner, cure=self.cure) from self.error


@dataclass(frozen=True)
class BackendReport:
    """One line of ``drivetrain backends``.

    Args:
        name: of the backend; of the plugin when that is broken.
        summary: one line.
        aliases: other names.
        distribution: who brings it.
        version: of the distribution.
        api: contract version of the plugin; ``None`` when it is broken.
        capabilities: what it declares; ``None`` when it is broken.
        ready: it can run here.
        why: why not, or a remark.
        cure: what to type next.
        traceback: of a broken plugin, else empty.
    """

    name: str
    summary: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    api: int | None
    capabilities: Capabilities | None
    ready: bool
    why: str = ""
    cure: str = ""
    traceback: str = ""


def _found(points: Iterable[metadata.EntryPoint]) -> list[Plugin]:
    """Plugins in the order of their names, without importing them. Warns of announced hooks that do not exist."""
    plugins: list[Plugin] = []
    # Backends first: hooks of the same module join them.
    for point in sorted(points, key=lambda point: point.group != GROUP):
        found = point.dist
        name, version = (found.name, found.version) if found is not None else ("an unknown distribution", "")
        if point.group == GROUP:
            plugins.append(Plugin(point.name, point.module, name, version, {_BACKENDS}))
            continue
        same = (each for each in plugins if (each.value, each.distribution) == (point.module, name))
        plugin = next(same, None)
        if plugin is None:
            plugin = Plugin(name, point.module, name, version)
            plugins.append(plugin)
        if point.name in _EVENTS:
            plugin.hooks.add(point.name)
        else:
            guess = did_you_mean(point.name, _EVENTS)
            _logger.warning(
                "%s announces the hook %r in its entry points, and there is none. %s", plugin.owner, point.name, guess
            )
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.owner))


# ---- checks of a plugin -----------------------------------------------------------------------------------------


def check_marks(module: object) -> None:
    """Refuse functions with the name of a hook that would never be called.

    Raises:
        ValueError: a misspelt hook, or one without ``@hookimpl``.
    """
    known = [_PREFIX + event for event in _EVENTS]
    home = getattr(module, "__name__", None)
    for name, function in vars(module).items():
        if not name.startswith(_PREFIX) or not inspect.isfunction(function):
            continue
        if function.__module__ != home and home is not None:
            continue  # imported from elsewhere, for example our own hookspecs
        if name not in known:
            raise ValueError(sentences(f"there is no hook {name!r}.", did_you_mean(name, known)))
        if not hasattr(function, f"{GROUP}_impl"):
            raise ValueError(f"{name} lacks @hookimpl (from drivetrain.api import hookimpl) and would never be called")


def check_announced(plugin: Plugin, implemented: Iterable[str]) -> None:
    """Refuse hooks that no entry point announces: they would be called only when something else loads the module.

    Raises:
        ValueError: names them, with the lines that announce them.
    """
    missing = sorted(set(implemented) - plugin.hooks)
    if missing:
        lines = "; ".join(f'{event} = "{plugin.value}"' for event in missing if event != _BACKENDS)
        groups = [f'[project.entry-points."{HOOK_GROUP}"] {lines}'] if lines else []
        if _BACKENDS in missing:
            groups.insert(0, f'[project.entry-points.{GROUP}] NAME = "{plugin.value}"')
        raise ValueError(
            f"no entry point announces {listed(_PREFIX + event for event in missing)}; "
            f"write {' and '.join(groups)} in its pyproject.toml, and install it again"
        )


def checked_infos(answer: object) -> tuple[BackendInfo, ...]:
    """Return a plugin's answer to ``drivetrain_backends`` if it is one.

    Raises:
        TypeError: it is not a list of :class:`BackendInfo`.
        ValueError: a name is not lower case, appears twice, or is a key that configuration files have already.
    """
    if not isinstance(answer, list | tuple) or not all(isinstance(info, BackendInfo) for info in answer):
        raise TypeError(f"drivetrain_backends returned {answer!r}, not a list of BackendInfo")
    names = [info.name for info in answer]
    for name in names:
        if name != name.lower() or not name.isidentifier():
            raise ValueError(f"a backend's name is a lower-case identifier, not {name!r}")
        if name in CORE_KEYS or name == AUTO or may_be_foreign(name):
            sentence = f"a backend cannot be called {name!r}: its section could not be told from that key"
            raise ValueError(f"{sentence} of a configuration file; give it another name")
    if len(set(names)) != len(names):
        raise ValueError(f"drivetrain_backends names a backend twice: {', '.join(names)}")
    return tuple(answer)


# ---- distributions ----------------------------------------------------------------------------------------------


def core_version() -> str:
    """Return the core's version."""
    try:
        return metadata.version(CORE)
    except metadata.PackageNotFoundError:
        return "(not installed, run from its source)"


_TOOLS = ("clusters", "convert", "planner", "testing", "trackers", "transformers")
"""Extras whose distribution brings no backend."""


def known_extras(requirement: str = f"{CORE}-{{}}") -> tuple[str, ...]:
    """Return the core's extras that require this distribution, in which ``{}`` stands for the extra's name.

    With the default those that stand for a backend: ``drivetrain-<extra>``, but for tools.
    """
    try:
        core = metadata.metadata(CORE)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ()
    required = {_required(line) for line in core.get_all("Requires-Dist") or ()}
    extras = core.get_all("Provides-Extra") or ()
    return tuple(extra for extra in extras if extra not in _TOOLS and requirement.format(extra) in required)


def _required(requirement: str) -> str:
    """The distribution that a requirement is about, in lower case, with its extras if it names some."""
    return re.split(r"[\s<>=!~;(]", requirement.strip(), maxsplit=1)[0].lower()


def pip_line(extra: str, part: str = "") -> str:
    """Return the command that installs one of the core's extras.

    Where the core is an editable install from a clone, that is its folders in the clone: what belongs to a clone is
    not on an index, or is not of the same day. Otherwise the published extra.

    Args:
        extra: of the core, or ``"NAME"``, which stands for any of them in a sentence.
        part: an extra of the distribution ``drivetrain-<extra>``, for what it needs for this alone.
    """
    import shlex

    clone = source_tree()
    folders = [] if clone is None else _folders(clone, extra)
    if not folders:
        return f'pip install "{CORE}-{extra}[{part}]"' if part else f'pip install "{CORE}[{extra}]"'
    if part:
        folders[-1] += f"[{part}]"
    return "pip install " + " ".join(f"--editable {shlex.quote(folder)}" for folder in folders)


@cache
def source_tree() -> Path | None:
    """Return the root of the clone that the core is an editable install of; ``None`` if it was installed otherwise."""
    import json
    from urllib.parse import unquote, urlsplit

    try:
        text = metadata.distribution(CORE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(text or "{}")
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file" or not origin.get("dir_info", {}).get("editable"):
        return None
    root = Path(unquote(url.path)).parent
    return root if (root / "core/pyproject.toml").is_file() else None


def _folders(clone: Path, extra: str) -> list[str]:
    """The folders that an extra of the core is installed from, those that it needs first; empty if there is none."""
    if extra == "NAME":
        return [str(clone / "plugins/NAME")]
    found: dict[str, None] = {}

    def add(requirement: str) -> None:
        name, _, extras = _required(requirement).partition("[")
        folder = clone / "kit" if name == f"{CORE}-testing" else clone / "plugins" / name.removeprefix(f"{CORE}-")
        if name == CORE or not name.startswith(f"{CORE}-") or not (folder / "pyproject.toml").is_file():
            return
        for needed in _project(folder)["dependencies"]:
            if unmet_requirements([needed]):
                add(needed)
        found[f"{folder}[{extras}" if extras else str(folder)] = None

    for requirement in _project(clone / "core").get("optional-dependencies", {}).get(extra, ()):
        add(requirement)
    return list(found)


def _project(folder: Path) -> dict[str, Any]:
    """The table ``[project]`` of the distribution in a folder."""
    import tomllib

    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def unmet_requirements(requirements: Iterable[str]) -> list[tuple[str, str]]:
    """Return the requirements that this environment does not meet, each with what is there instead."""
    from packaging.requirements import Requirement

    unmet: list[tuple[str, str]] = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append((line, "not installed"))
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            unmet.append((line, f"installed is {found}"))
    return unmet


def core_mismatch(distribution: str) -> str:
    """Return a sentence when a distribution was made for another version of the core, else an empty string."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return ""
    for line, state in unmet_requirements(line for line in lines if _required(line).partition("[")[0] == CORE):
        return f"It wants {line}, {state}."
    return ""


def import_object(target: str, owner: str) -> object:
    """Import ``"package.module:name"``; any failure becomes :class:`BackendBrokenError` with it as the cause."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in a module must not end the importer
        what = f"{target} could not be imported: {type(error).__name__}: {error}"
        raise BackendBrokenError(what, whose=owner, cure=REPORT_IT) from error


def conflict(name: str, plugins: Sequence[Plugin]) -> BackendConflictError:
    """The error for two plugins that provide one name."""
    owners = sorted({plugin.owner for plugin in plugins})
    if len(owners) == 1:
        what = f"the name {name!r} is claimed twice by one distribution"
        return BackendConflictError(what, whose=owners[0], cure=REPORT_IT)
    removals = " or ".join(
        f"pip uninstall {distribution}" for distribution in sorted({p.distribution for p in plugins})
    )
    return BackendConflictError(f"the name {name!r} is claimed by {' and '.join(owners)}", cure=f"Run: {removals}")


def not_found(name: str, plugins: Iterable[Plugin]) -> BackendNotFoundError:
    """The error for an unknown name: what is installed, what was probably meant, what to install."""
    plugins = list(plugins)
    infos = [info for plugin in plugins for info in plugin.infos]
    installed = {info.name for info in infos}
    words = installed | {alias for info in infos for alias in info.aliases}
    extras = set(known_extras()) - installed
    if name.lower() in extras:
        cure = f"Run: {pip_line(name.lower())}"
    else:
        guess = closest(name, words | extras)
        cure = "`drivetrain backends` lists what can be used." if guess is None else f"Did you mean {guess!r}?"
        if guess in extras:
            cure = f"Did you mean {guess!r}? It is not installed; run: {pip_line(guess)}"
    broken = [f"{plugin.name} ({plugin.owner})" for plugin in plugins if plugin.error is not None]
    remark = f"These plugins could not be loaded and may bring it: {listed(broken)}." if broken else ""
    what = f"no installed backend is called {name!r}; installed: {listed(installed)}"
    return BackendNotFoundError(what, cure=sentences(cure, remark))


def none_fits(world_size: int, plugins: Iterable[Plugin], reasons: Sequence[str]) -> BackendNotFoundError:
    """The error where no default backend fits this world size."""
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    installed = {info.name for plugin in plugins for info in plugin.infos}
    missing = set(known_extras()) - installed
    install = f"Install one: {pip_line('NAME')}, NAME one of {listed(missing)}." if missing else ""
    return BackendNotFoundError(
        f"no installed backend can train over {processes} without being named; installed: {listed(installed)}",
        cure=sentences(*reasons, install),
    )


def _unique(noun: str, brought: Iterable[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Owner and target by name, given (owner, name, target). Raises :class:`BackendConflictError` for a name twice."""
    found: dict[str, tuple[str, str]] = {}
    for owner, name, target in brought:
        if name in found:
            raise BackendConflictError(
                f"two plugins bring {noun} {name!r}: {found[name][0]} and {owner}", cure="Uninstall one of the two."
            )
        found[name] = (owner, target)
    return found


@cache
def get_registry() -> Registry:
    """Return this process's registry, made at the first call."""
    return Registry()


def reset_registry() -> None:
    """Forget everything that was found and registered; the next :func:`get_registry` looks again. For tests."""
    get_registry.cache_clear()


class Registry:
    """All plugins that this process can see.

    Args:
        entry_points: where plugins are; ``None`` = what is installed.

    With ``DRIVETRAIN_TRACE_HOOKS=1`` in the environment every hook call is written to stderr.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        if entry_points is None:
            installed = metadata.entry_points()
            entry_points = [*installed.select(group=GROUP), *installed.select(group=HOOK_GROUP)]
        self._plugins = _found(entry_points)
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        if os.environ.get("DRIVETRAIN_TRACE_HOOKS", "0") not in {"", "0"}:
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()

    # ---- names --------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> str:
        """Return the canonical name of a backend, given that name or an alias in any case.

        Raises:
            BackendNotFoundError: no installed plugin provides it.
            BackendConflictError: two distributions claim it.
            BackendBrokenError: the plugin that brings it failed to import.
        """
        return self._find(name)[1].name

    def canonical(self, name: str) -> str:
        """As :meth:`resolve`, but an unknown name becomes its lower-case form. For comparisons only.

        The aliases of a loaded plugin, such as that of the chosen backend, are resolved without loading the others.
        """
        word = name.lower()

        def known(plugins: Iterable[Plugin]) -> str | None:
            infos = (info for plugin in plugins for info in plugin.infos)
            return next((info.name for info in infos if word in (info.name, *map(str.lower, info.aliases))), None)

        return known(self._plugins) or known(self._with(_BACKENDS)) or word

    def names(self) -> tuple[str, ...]:
        """Return the names of all backends found, sorted; a broken plugin counts by its entry point's name."""
        plugins = self._with(_BACKENDS)
        broken = {plugin.name for plugin in plugins if plugin.error is not None}
        return tuple(sorted(broken | {info.name for plugin in plugins for info in plugin.infos}))

    def info(self, name: str) -> BackendInfo:
        """Return the description of a backend. Raises as :meth:`resolve`, and :class:`ContractMismatchError`."""
        plugin, info = self._find(name)
        if info.api != CONTRACT:
            raise ContractMismatchError(
                f"backend {info.name!r} speaks version {info.api} of the backend contract, "
                f"this core speaks version {CONTRACT}",
                whose=plugin.owner,
                cure=f"Run: pip install --upgrade {plugin.distribution if info.api < CONTRACT else CORE}",
            )
        return info

    def infos(self) -> list[tuple[str, BackendInfo]]:
        """Return owner and description of each backend that was found and speaks this version of the contract."""
        brought = ((plugin.owner, info) for plugin in self._with(_BACKENDS) for info in plugin.infos)
        return [(owner, info) for owner, info in brought if info.api == CONTRACT]

    def owner(self, name: str) -> str:
        """Return distribution and version of the plugin that brings a backend. Raises as :meth:`resolve`."""
        return self._find(name)[0].owner

    def default(self, world_size: int) -> BackendInfo:
        """Return the backend to take when the user names none: the highest ``preference`` that can run here.

        Raises:
            BackendNotFoundError: no installed backend trains over ``world_size`` processes.
        """
        plugins = self._with(_BACKENDS)
        reasons: list[str] = []
        fitting = [
            (-info.preference, info.name, plugin.owner)
            for plugin in plugins
            for info in plugin.infos
            if info.preference is not None and (info.capabilities.multi_process or world_size == 1)
        ]
        for _, name, owner in sorted(fitting):
            try:
                found = self.info(name)
                self.check_ready(found)
            except BackendError as error:
                reasons.append(f"{name}, brought by {owner}, cannot be used: {error}")
            else:
                return found
        raise none_fits(world_size, plugins, reasons)

    # ---- loading ------------------------------------------------------------------------------------------------

    def check_ready(self, info: BackendInfo) -> Readiness:
        """Check that a backend can run here: its requirements, then its probe. Imports nothing heavy.

        Returns:
            The probe's answer, whose reason may be a remark.

        Raises:
            BackendBlockedError: a requirement is not met, or the probe says no.
            BackendBrokenError: the probe failed.
        """
        owner = self._owner_of(info)
        unmet = unmet_requirements(info.requires)
        if unmet:
            found = "; ".join(f"{requirement} ({state})" for requirement, state in unmet)
            needed = " ".join(f'"{requirement}"' for requirement, _ in unmet)
            raise BackendBlockedError(
                f"backend {info.name!r} needs {found}", whose=owner, cure=f"Run: pip install {needed}"
            )
        try:
            readiness = info.probe()
            if not isinstance(readiness, Readiness):
                raise TypeError(f"it returned {readiness!r}, not a Readiness")  # noqa: TRY301 - as whatever else it raises
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a probe must not end the caller
            what = f"the probe of backend {info.name!r} failed: {type(error).__name__}: {error}"
            raise BackendBrokenError(what, whose=owner, cure=REPORT_IT) from error
        if not readiness.ready:
            what = f"backend {info.name!r} cannot run here: {readiness.reason}"
            raise BackendBlockedError(what, whose=owner, cure=readiness.cure)
        return readiness

    def load_backend(self, info: BackendInfo) -> type[Backend]:
        """Import and return the class of a backend that :meth:`info` returned.

        Raises:
            BackendBlockedError: see :meth:`check_ready`.
            BackendBrokenError: the probe or the import failed, or what it found is no :class:`Backend`.
        """
        self.check_ready(info)
        owner = self._owner_of(info)
        kind = import_object(info.backend, owner)
        if not (isinstance(kind, type) and issubclass(kind, Backend)):
            what = f"{info.backend} is not a class derived from drivetrain.api.Backend"
            raise BackendBrokenError(what, whose=owner, cure=REPORT_IT)
        return kind

    def load_section(self, info: BackendInfo) -> type[BaseModel] | None:
        """Import and return the pydantic model of a backend's config section; ``None`` when it has none.

        Raises:
            BackendBrokenError: the import failed, or what it found is no pydantic model.
        """
        if info.config is None:
            return None
        from pydantic import BaseModel

        owner = self._owner_of(info)
        kind = import_object(info.config, owner)
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            raise BackendBrokenError(f"{info.config} is not a pydantic model", whose=owner, cure=REPORT_IT)
        return kind

    def import_rules(self) -> dict[str, Mapping[str, Any]]:
        """Return how sections of other libraries' files are read: rules by key, by the section's name there.

        Raises:
            BackendBrokenError, BackendConflictError: rules cannot be imported, or two plugins bring some for one name.
        """
        brought = [
            (plugin.owner, section, target)
            for plugin in self._with(_BACKENDS)
            for info in plugin.infos
            for section, target in info.imports.items()
        ]
        found: dict[str, Mapping[str, Any]] = {}
        for section, (owner, target) in _unique("rules for the section", brought).items():
            rules = import_object(target, owner)
            if not isinstance(rules, Mapping):
                raise BackendBrokenError(f"{target} is no mapping of rules", whose=owner, cure=REPORT_IT)
            found[section] = rules
        return found

    def load_all(self) -> None:
        """Import every plugin. May be called twice."""
        for plugin in self._plugins:
            self._load(plugin)

    def register(self, plugin: object, *, name: str) -> None:
        """Add a plugin that is not installed: a module or object with hook implementations, for this process only.

        Raises:
            BackendBrokenError: a hook is misspelt or fails.
        """
        record = Plugin(name, f"registered in this process: {name}", distribution=name, version="", hooks=set(_EVENTS))
        self._load(record, plugin)
        record.check_loaded()
        self._plugins.append(record)

    # ---- reports ------------------------------------------------------------------------------------------------

    def reports(self) -> list[BackendReport]:
        """Return distribution, capabilities and readiness of each backend, broken plugins included."""
        self.load_all()
        found = [
            BackendReport(
                *(plugin.name, "", (), plugin.distribution, plugin.version, None, None, False),
                why=plugin.reason,
                cure=plugin.cure,
                traceback="".join(traceback.format_exception(plugin.error)),
            )
            for plugin in self._plugins
            if plugin.error is not None
        ]
        found += [self._report(plugin, info) for plugin in self._plugins for info in plugin.infos]
        return sorted(found, key=lambda report: (report.name, report.distribution))

    def plugins(self) -> list[Plugin]:
        """Return all plugins, whether they bring backends or not, loaded or broken."""
        self.load_all()
        return list(self._plugins)

    def _report(self, plugin: Plugin, info: BackendInfo) -> BackendReport:
        ready, why, cure = False, "", ""
        try:
            owner = self.owner(info.name)
            if owner != plugin.owner:
                raise BackendConflictError(
                    f"the name {info.name!r} belongs to {owner}, whose entry point it is",
                    cure="Uninstall one of the two.",
                )
            ready, why = True, self.check_ready(self.info(info.name)).reason
        except BackendError as error:
            why, cure = error.what, error.cure
        return BackendReport(
            *(info.name, info.summary, info.aliases, plugin.distribution, plugin.version, info.api),
            *(info.capabilities, ready, why, cure),
        )

    # ---- hooks --------------------------------------------------------------------------------------------------

    def listens(self, event: str) -> bool:
        """Whether any plugin implements this event's hook (named without ``drivetrain_``). Imports nothing."""
        return any(event in plugin.hooks and plugin.error is None for plugin in self._plugins)

    def notify(self, event: str, **arguments: Any) -> None:
        """Call every observer of an event. An exception is logged with the plugin's name; others are still called."""
        for plugin in self._implementing(event):
            _, error = self._call(plugin, event, **arguments)
            if error is not None:
                _logger.error(
                    "plugin %s (%s) failed in %s%s", plugin.name, plugin.owner, _PREFIX, event, exc_info=error
                )

    def trackers(self) -> dict[str, str]:
        """Return ``{"name": "package.module:Class"}`` of all plugins' experiment trackers.

        Raises:
            BackendConflictError: two plugins bring one name.
        """
        brought = [
            (plugin.owner, name, target)
            for plugin, answer in self._collect("trackers")
            for name, target in dict(answer).items()
        ]
        return {name: target for name, (_, target) in sorted(_unique("a tracker named", brought).items())}

    def devices(self) -> list[Mapping[str, str]]:
        """Return all plugins' descriptions of device kinds beyond those torch knows."""
        return [device for _, answer in self._collect("devices") for device in answer]

    def named_object(self, name: str) -> Any:
        """The object that an installed plugin gives this name.

        Raises:
            AttributeError: no installed plugin provides it.
            AbsentNameError: no installed plugin provides it, but one that is not installed might.
            BackendConflictError: two backends provide it.
            BackendBrokenError: its import failed.
        """
        found = [(owner, info.names[name]) for owner, info in self.infos() if name in info.names]
        missing = sorted(set(known_extras()) - set(self.names()))
        if not found and name.endswith("Plugin") and missing:
            raise AbsentNameError(
                f"no installed backend brings the name {name!r}",
                cure=f"Install the one that does: {pip_line('NAME')}, NAME one of {listed(missing)}.",
            )
        if not found:
            raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
        if len(found) > 1:
            raise BackendConflictError(
                f"two backends bring the name {name!r}: {found[0][0]} and {found[1][0]}",
                cure="Uninstall one of the two.",
            )
        owner, target = found[0]
        return import_object(target, owner)

    def add_commands(self, group: click.Group) -> list[str]:
        """Let plugins add subcommands; return one sentence for each that failed or whose name was taken."""
        import click

        complaints: list[str] = []
        for plugin in self._implementing("commands"):
            scratch = click.Group(group.name)
            _, error = self._call(plugin, "commands", group=scratch)
            if error is not None:
                complaints.append(f"{plugin.owner} could not add its commands: {type(error).__name__}: {error}")
                _logger.debug("commands of %s", plugin.owner, exc_info=error)
                continue
            taken = []
            for name, command in scratch.commands.items():
                there = group.get_command(click.Context(group), name)
                if there is None:
                    group.add_command(command, name)
                elif isinstance(there, click.Group) and isinstance(command, click.Group):
                    # Several plugins may share a group, as `drivetrain plan`; the first one's help is the group's.
                    taken += [f"{name} {each}" for each in command.commands if each in there.commands]
                    for each in set(command.commands) - set(there.commands):
                        there.add_command(command.commands[each], each)
                else:
                    taken.append(name)
            if taken:
                complaints.append(f"{plugin.owner} brings the command {listed(taken)}, which exists already")
        return complaints

    def tensor_parallel_plan(self, model: nn.Module, degree: int) -> Mapping[str, str] | None:
        """Ask the plugins how to split a model along ``tp``: the first answer, or ``None``."""
        answer: Mapping[str, str] | None = self._first("tensor_parallel_plan", model=model, degree=degree)
        return answer

    def pipeline_split(self, model: nn.Module, num_stages: int) -> Sequence[str] | None:
        """Ask the plugins where a model's pipeline stages begin: the first answer, or ``None``."""
        answer: Sequence[str] | None = self._first("pipeline_split", model=model, num_stages=num_stages)
        return answer

    def choose(self, resolved: ResolvedConfig) -> Mapping[str, Any] | None:
        """Ask the plugins what ``distributed_type: auto`` stands for: the first answer, or ``None``."""
        answer: Mapping[str, Any] | None = self._first("choose", resolved=resolved)
        return answer

    def predict(self, resolved: ResolvedConfig, plan: LaunchPlan) -> Mapping[str, Any] | None:
        """Ask the plugins what the layout that a configuration describes holds: the first answer, or ``None``."""
        answer: Mapping[str, Any] | None = self._first("predict", resolved=resolved, plan=plan)
        return answer

    def check_plan(self, accelerator: Any, predicted: Mapping[str, Any]) -> Any:
        """Ask the plugins to compare a run with its prediction: the first answer, or ``None``."""
        return self._first("check_plan", accelerator=accelerator, predicted=predicted)

    def out_of_memory(self, resolved: ResolvedConfig, plan: LaunchPlan) -> str | None:
        """Ask the plugins what to change after an error of memory: the first answer, or ``None``."""
        answer: str | None = self._first("out_of_memory", resolved=resolved, plan=plan)
        return answer

    # ---- internals ----------------------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[Plugin, BackendInfo]:
        """Return the plugin that provides a name. Raises as :meth:`resolve`."""
        wanted = name.lower()
        if wanted == AUTO:
            raise BackendNotFoundError(
                "distributed_type: auto is replaced by a backend in `drivetrain launch`, before the script starts, and "
                "this script was started without it",
                cure="Start the script with `drivetrain launch`, or pass the file that an earlier launch has written.",
            )
        named = [plugin for plugin in self._plugins if plugin.name.lower() == wanted and _BACKENDS in plugin.hooks]
        if len({plugin.owner for plugin in named}) > 1:
            raise conflict(wanted, named)
        for plugin in named:
            self._load(plugin)
            plugin.check_loaded()
            for info in plugin.infos:
                if info.name == wanted:
                    return plugin, info
        plugins = self._with(_BACKENDS)
        pairs = [(plugin, info) for plugin in plugins for info in plugin.infos]
        for claims in (
            [pair for pair in pairs if pair[1].name == wanted],
            [pair for pair in pairs if wanted in {alias.lower() for alias in pair[1].aliases}],
        ):
            if len(claims) > 1:
                raise conflict(wanted, [plugin for plugin, _ in claims])
            if claims:
                return claims[0]
        raise not_found(name, plugins)

    def _owner_of(self, info: BackendInfo) -> str:
        """Return distribution and version of the plugin that gave this description, without a search by name."""
        found = next((plugin for plugin in self._plugins if any(each is info for each in plugin.infos)), None)
        return self.owner(info.name) if found is None else found.owner

    def _with(self, event: str) -> list[Plugin]:
        """Plugins that announce a hook, all of them loaded, in the order of the registry."""
        plugins = [plugin for plugin in self._plugins if event in plugin.hooks]
        for plugin in plugins:
            self._load(plugin)
        return plugins

    def _load(self, plugin: Plugin, module: object | None = None) -> None:
        """Import a plugin, unless its module is given, and read its descriptions; or record why that failed. Once."""
        if plugin.loaded:
            return
        plugin.loaded = True
        failed = "could not be imported"
        try:
            module = importlib.import_module(plugin.value) if module is None else module
            failed = "cannot be used"
            if self._manager.is_registered(module):  # a second entry point to one module: the first one counts
                return
            plugin.module = module
            check_marks(module)
            self._manager.register(module, name=f"{plugin.name} of {plugin.owner}")
            self._manager.check_pending()
            hooks = sorted(caller.name.removeprefix(_PREFIX) for caller in self._manager.get_hookcallers(module) or ())
            check_announced(plugin, hooks)
            plugin.hooks.intersection_update(hooks)
            answers, error = self._call(plugin, _BACKENDS)
            if error is not None:
                raise error  # noqa: TRY301 - as whatever else it raises
            plugin.infos = tuple(info for answer in answers for info in checked_infos(answer))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - recorded, shown, and raised when one of its names is asked for
            if self._manager.is_registered(module):
                self._manager.unregister(module)
            plugin.fail(error, f"plugin {plugin.name!r} {failed}")

    def _implementing(self, event: str) -> list[Plugin]:
        """Plugins that implement a hook, in the order of the registry; those that announce it are loaded."""
        return [plugin for plugin in self._with(event) if plugin.module is not None and event in plugin.hooks]

    def _call(self, plugin: Plugin, event: str, **arguments: Any) -> tuple[list[Any], BaseException | None]:
        """Call one plugin's implementation of a hook: its answers, and what it raised, ``SystemExit`` too."""
        others = [module for module in self._manager.get_plugins() if module is not plugin.module]
        try:
            return self._manager.subset_hook_caller(_PREFIX + event, others)(**arguments), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - returned
            return [], error

    def _first(self, event: str, **arguments: Any) -> Any:
        """Call the plugins until one returns a result. Exceptions propagate; SystemExit becomes an error."""
        asked = self._implementing(event)
        try:
            return getattr(self._manager.hook, _PREFIX + event)(**arguments)
        except (KeyboardInterrupt, Exception):
            raise
        except BaseException as error:
            owners = listed(plugin.owner for plugin in asked)
            what = f"a plugin raised {type(error).__name__} in the hook {_PREFIX}{event}; it is implemented by {owners}"
            raise BackendBrokenError(what, cure=REPORT_IT) from error

    def _collect(self, event: str) -> list[tuple[Plugin, Any]]:
        """Call every plugin; one that raises is marked as broken."""
        found: list[tuple[Plugin, Any]] = []
        for plugin in self._implementing(event):
            answers, error = self._call(plugin, event)
            found += [(plugin, answer) for answer in answers]
            if error is not None:
                self._manager.unregister(plugin.module)
                plugin.fail(error, f"plugin {plugin.name!r} failed in the hook {_PREFIX}{event}")
                _logger.warning("%s [%s]; its other answers are not used either", plugin.reason, plugin.owner)
        return found
