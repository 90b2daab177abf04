"""Find, check, load and explain plugins: the only user of pluggy and of entry points.

A plugin is a module that an entry point of the group ``drivetrain`` names. Loading by name imports that plugin alone;
all are imported only for an alias, a listing, or a hook that anyone may implement. What goes wrong in one plugin is
recorded with its distribution and harms nobody else.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from drivetrain import hookspecs
from drivetrain.backend import CONTRACT, Backend, BackendInfo, Capabilities, Readiness
from drivetrain.config.keys import CORE_KEYS, may_be_foreign
from drivetrain.errors import (
    BackendBlockedError,
    BackendBrokenError,
    BackendConflictError,
    BackendError,
    BackendNotFoundError,
    ContractMismatchError,
    closest,
    did_you_mean,
    listed,
    sentences,
)
from drivetrain.hookspecs import GROUP

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel
    from torch import nn

# ---- What is installed, as data: a record for each plugin, what is reported about it, and facts about distributions

CORE = "drivetrain"
"""Name of the core's own distribution; first-party plugins are ``drivetrain-<name>``."""


@dataclass
class Plugin:
    """One entry point and what became of it.

    Args:
        name: the entry point's name.
        value: the module that it names.
        distribution: the distribution that brings it.
        version: of the distribution; empty when it is not installed but registered by a script.
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
    loaded: bool = False
    module: object | None = None
    infos: tuple[BackendInfo, ...] = ()
    error: BaseException | None = None
    reason: str = ""
    cure: str = ""

    @classmethod
    def of(cls, point: metadata.EntryPoint) -> Plugin:
        """Describe an entry point; nothing is imported."""
        found = point.dist
        name, version = (found.name, found.version) if found is not None else ("an unknown distribution", "")
        return cls(name=point.name, value=point.module, distribution=name, version=version)

    @property
    def owner(self) -> str:
        """Distribution and version, as error messages name them."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def broken(self) -> bool:
        return self.error is not None

    @property
    def traceback(self) -> str:
        """The failure as Python prints it; empty when there was none."""
        return "".join(traceback.format_exception(self.error)) if self.error is not None else ""

    def fail(self, error: BaseException, what: str) -> None:
        """Record a failure."""
        self.module, self.infos, self.error = None, (), error
        self.reason = f"{what}: {type(error).__name__}: {error}" if str(error) else f"{what}: {type(error).__name__}"
        self.cure = sentences(core_mismatch(self.distribution), "`drivetrain backends --verbose` shows the traceback.")


@dataclass(frozen=True)
class BackendReport:
    """One line of ``drivetrain backends``.

    Args:
        name: of the backend; of the entry point when the plugin is broken.
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

    @classmethod
    def of(cls, plugin: Plugin, info: BackendInfo, *, ready: bool, why: str = "", cure: str = "") -> BackendReport:
        return cls(
            name=info.name,
            summary=info.summary,
            aliases=info.aliases,
            distribution=plugin.distribution,
            version=plugin.version,
            api=info.api,
            capabilities=info.capabilities,
            ready=ready,
            why=why,
            cure=cure,
        )

    @classmethod
    def of_broken(cls, plugin: Plugin) -> BackendReport:
        return cls(
            name=plugin.name,
            summary="",
            aliases=(),
            distribution=plugin.distribution,
            version=plugin.version,
            api=None,
            capabilities=None,
            ready=False,
            why=plugin.reason,
            cure=plugin.cure,
            traceback=plugin.traceback,
        )


@dataclass(frozen=True)
class PluginReport:
    """One plugin, whether it brings a backend or not: for bug reports and run headers."""

    name: str
    distribution: str
    version: str
    backends: tuple[str, ...] = ()
    hooks: tuple[str, ...] = field(default_factory=tuple)
    broken: str = ""

    @classmethod
    def of(cls, plugin: Plugin, hooks: tuple[str, ...]) -> PluginReport:
        """What is known of a loaded plugin, with the hooks that it implements."""
        backends = tuple(info.name for info in plugin.infos)
        return cls(plugin.name, plugin.distribution, plugin.version, backends, hooks, plugin.reason)


# ---- checks of what a plugin says -------------------------------------------------------------------------------


def hook_names() -> tuple[str, ...]:
    """Return the names of all hooks of this version."""
    return tuple(
        name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("drivetrain_")
    )


def check_marks(module: object) -> None:
    """Refuse functions that are named as hooks are and would never be called.

    Raises:
        ValueError: a misspelt hook, or one without ``@hookimpl``.
    """
    known = hook_names()
    home = getattr(module, "__name__", None)
    for name, function in vars(module).items():
        if not name.startswith("drivetrain_") or not inspect.isfunction(function):
            continue
        if function.__module__ != home and home is not None:
            continue  # imported from elsewhere, the house's own hookspecs for example
        if name not in known:
            guess = did_you_mean(name, known)
            raise ValueError(sentences(f"there is no hook {name!r}.", guess))
        if not hasattr(function, f"{hookspecs.GROUP}_impl"):
            raise ValueError(f"{name} lacks @hookimpl (from drivetrain.api import hookimpl) and would never be called")


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
        if name in CORE_KEYS or may_be_foreign(name):
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


_TOOLS = ("convert", "testing")
"""Extras whose distribution brings no backend."""


def known_extras() -> tuple[str, ...]:
    """Return the core's extras that stand for a backend: those that require ``drivetrain-<extra>``, but for tools."""
    try:
        core = metadata.metadata(CORE)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ()
    required = {line.split(";")[0].strip().lower() for line in core.get_all("Requires-Dist") or ()}
    extras = core.get_all("Provides-Extra") or ()
    return tuple(
        extra
        for extra in extras
        if extra not in _TOOLS and any(_names(line, f"{CORE}-{extra}") for line in required)
    )


def _names(requirement: str, distribution: str) -> bool:
    """Whether a requirement line is about this distribution and not one whose name is longer."""
    rest = requirement.removeprefix(distribution)
    return rest != requirement and (not rest or rest[0] in " <>=!~([;")


def pip_line(extra: str) -> str:
    """Return the command that installs one of the core's extras."""
    return f'pip install "{CORE}[{extra}]"'


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
    for line, state in unmet_requirements(line for line in lines if _names(line.lower(), CORE)):
        return f"It wants {line}, {state}."
    return ""


# ---- Check that a backend can be used: its plugin, contract version and requirements

REPORT_IT = "Report this to its author."


def check_loaded(plugin: Plugin) -> None:
    """Raise :class:`BackendBrokenError`, with the original failure as its cause, when a plugin could not be loaded."""
    if plugin.error is not None:
        raise BackendBrokenError(plugin.reason, whose=plugin.owner, cure=plugin.cure) from plugin.error


def check_contract(plugin: Plugin, info: BackendInfo) -> None:
    """Raise :class:`ContractMismatchError` when a backend was written for another version of the contract."""
    if info.api == CONTRACT:
        return
    behind = plugin.distribution if info.api < CONTRACT else CORE
    raise ContractMismatchError(
        f"backend {info.name!r} speaks version {info.api} of the backend contract, this core speaks version {CONTRACT}",
        whose=plugin.owner,
        cure=f"Run: pip install --upgrade {behind}",
    )


def check_ready(plugin: Plugin, info: BackendInfo) -> Readiness:
    """Check requirements, then the probe. Imports nothing heavy; returns the probe's answer.

    Raises:
        BackendBlockedError: a requirement is not met, or the probe says no.
        BackendBrokenError: the probe failed.
    """
    unmet = unmet_requirements(info.requires)
    if unmet:
        found = "; ".join(f"{requirement} ({state})" for requirement, state in unmet)
        needed = " ".join(f'"{requirement}"' for requirement, _ in unmet)
        raise BackendBlockedError(
            f"backend {info.name!r} needs {found}", whose=plugin.owner, cure=f"Run: pip install {needed}"
        )
    try:
        readiness = info.probe()
        if not isinstance(readiness, Readiness):
            raise TypeError(f"it returned {readiness!r}, not a Readiness")  # noqa: TRY301 - as whatever else it raises
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() of a probe must not end who asks
        what = f"the probe of backend {info.name!r} failed: {type(error).__name__}: {error}"
        raise BackendBrokenError(what, whose=plugin.owner, cure=REPORT_IT) from error
    if not readiness.ready:
        what = f"backend {info.name!r} cannot run here: {readiness.reason}"
        raise BackendBlockedError(what, whose=plugin.owner, cure=readiness.cure)
    return readiness


def import_object(target: str, owner: str) -> object:
    """Import ``"package.module:name"``; any failure becomes :class:`BackendBrokenError` with it as the cause."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() of a module must not end who imports it
        what = f"{target} could not be imported: {type(error).__name__}: {error}"
        raise BackendBrokenError(what, whose=owner, cure=REPORT_IT) from error


def import_rules(infos: Iterable[tuple[str, BackendInfo]]) -> dict[str, Mapping[str, Any]]:
    """Rules for sections of other libraries' files, from all backends with their owners."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for owner, info in infos:
        for section, target in info.imports.items():
            if section in found:
                raise BackendConflictError(
                    f"two plugins bring rules for the section {section!r}: {found[section][0]} and {owner}",
                    cure="Uninstall one of the two.",
                )
            rules = import_object(target, owner)
            if not isinstance(rules, Mapping):
                raise BackendBrokenError(f"{target} is no mapping of rules", whose=owner, cure=REPORT_IT)
            found[section] = (owner, rules)
    return {section: rules for section, (_, rules) in found.items()}


def conflict(name: str, plugins: Sequence[Plugin]) -> BackendConflictError:
    """Two claims to one name."""
    owners = sorted({plugin.owner for plugin in plugins})
    if len(owners) == 1:
        what = f"the name {name!r} is claimed twice by one distribution"
        return BackendConflictError(what, whose=owners[0], cure=REPORT_IT)
    removals = " or ".join(
        f"pip uninstall {distribution}" for distribution in sorted({p.distribution for p in plugins})
    )
    return BackendConflictError(f"the name {name!r} is claimed by {' and '.join(owners)}", cure=f"Run: {removals}")


def not_found(name: str, plugins: Iterable[Plugin]) -> BackendNotFoundError:
    """Nobody brings this name: what is installed, what was probably meant, what to install."""
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
    broken = [f"{plugin.name} ({plugin.owner})" for plugin in plugins if plugin.broken]
    remark = f"These plugins could not be loaded and may bring it: {listed(broken)}." if broken else ""
    what = f"no installed backend is called {name!r}; installed: {listed(installed)}"
    return BackendNotFoundError(what, cure=sentences(cure, remark))


def none_fits(world_size: int, plugins: Iterable[Plugin], reasons: Sequence[str]) -> BackendNotFoundError:
    """No backend can be taken for a world of this size when the user names none."""
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    installed = {info.name for plugin in plugins for info in plugin.infos}
    missing = set(known_extras()) - installed
    install = f"Install one: {pip_line('NAME')}, NAME one of {listed(missing)}." if missing else ""
    return BackendNotFoundError(
        f"no installed backend can train over {processes} without being named; installed: {listed(installed)}",
        cure=sentences(*reasons, install),
    )


# ---- Find, check, load and explain plugins: the only user of pluggy and of entry points

_PREFIX = "drivetrain_"
_logger = logging.getLogger("drivetrain.plugins")
_registries: list[Registry] = []  # the one of this process, once it is made


def get_registry() -> Registry:
    """Return this process's registry, made at the first call."""
    if not _registries:
        _registries.append(Registry())
    return _registries[0]


def reset_registry() -> None:
    """Forget everything that was found and registered; the next :func:`get_registry` looks again. For tests."""
    _registries.clear()


class Registry:
    """All plugins that this process can see.

    Args:
        entry_points: where plugins are; ``None`` = what is installed.

    With ``DRIVETRAIN_TRACE_HOOKS=1`` in the environment every hook call is written to stderr.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        points = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
        self._plugins = sorted((Plugin.of(point) for point in points), key=lambda plugin: (plugin.name, plugin.owner))
        self._all_loaded = False
        self._canonical: dict[str, str] = {}
        self._unknown: set[str] = set()
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        if os.environ.get("DRIVETRAIN_TRACE_HOOKS", "0") not in {"", "0"}:
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()

    # ---- names --------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> str:
        """Return the canonical name of a backend, given that name or an alias in any case.

        Raises:
            BackendNotFoundError: nobody installed brings it.
            BackendConflictError: two distributions claim it.
            BackendBrokenError: the plugin that brings it failed to import.
        """
        if name not in self._canonical:
            self._canonical[name] = self._find(name)[1].name
        return self._canonical[name]

    def canonical(self, name: str) -> str:
        """As :meth:`resolve`, but a name that nobody brings becomes its lower-case form. For comparisons only."""
        if name in self._unknown:
            return name.lower()
        try:
            return self.resolve(name)
        except BackendNotFoundError:
            self._unknown.add(name)
            return name.lower()

    def names(self) -> tuple[str, ...]:
        """Return the names of all backends found, sorted; a broken plugin counts by its entry point's name."""
        self.load_all()
        broken = {plugin.name for plugin in self._plugins if plugin.broken}
        return tuple(sorted(broken | {info.name for plugin in self._plugins for info in plugin.infos}))

    def info(self, name: str) -> BackendInfo:
        """Return the description of a backend. Raises as :meth:`resolve`, and :class:`ContractMismatchError`."""
        plugin, info = self._find(name)
        check_contract(plugin, info)
        return info

    def owner(self, name: str) -> str:
        """Return distribution and version of the plugin that brings a backend. Raises as :meth:`resolve`."""
        return self._find(name)[0].owner

    def default(self, world_size: int) -> BackendInfo:
        """Return the backend to take when the user names none: the highest ``preference`` that can run here.

        Raises:
            BackendNotFoundError: no installed backend trains over ``world_size`` processes.
        """
        self.load_all()
        reasons: list[str] = []
        fitting = [
            (info.preference, plugin, info)
            for plugin in self._plugins
            for info in plugin.infos
            if info.preference is not None and (info.capabilities.multi_process or world_size == 1)
        ]
        for _, plugin, info in sorted(fitting, key=lambda item: (-item[0], item[2].name)):
            try:
                found = self.info(info.name)
                self.check_ready(found)
            except BackendError as error:
                reasons.append(f"{info.name}, brought by {plugin.owner}, cannot be used: {error}")
            else:
                return found
        raise none_fits(world_size, self._plugins, reasons)

    # ---- loading ------------------------------------------------------------------------------------------------

    def check_ready(self, info: BackendInfo) -> Readiness:
        """Check that a backend can run here: its requirements, then its probe. Imports nothing heavy.

        Returns:
            The probe's answer, whose reason may be a remark.

        Raises:
            BackendBlockedError: a requirement is not met, or the probe says no.
            BackendBrokenError: the probe failed.
        """
        return check_ready(self._find(info.name)[0], info)

    def load_backend(self, info: BackendInfo) -> type[Backend]:
        """Import and return a backend's class, after all checks.

        Raises:
            ContractMismatchError, BackendBlockedError: see :meth:`info` and :meth:`check_ready`.
            BackendBrokenError: the import failed, or what it found is no :class:`Backend`.
        """
        plugin, found = self._find(info.name)
        check_contract(plugin, found)
        self.check_ready(info)
        kind = import_object(info.backend, plugin.owner)
        if not (isinstance(kind, type) and issubclass(kind, Backend)):
            raise BackendBrokenError(
                f"{info.backend} is not a class derived from drivetrain.api.Backend",
                whose=plugin.owner,
                cure=REPORT_IT,
            )
        return kind

    def load_section(self, info: BackendInfo) -> type[BaseModel] | None:
        """Import and return the pydantic model of a backend's config section; ``None`` when it has none.

        Raises:
            BackendBrokenError: the import failed, or what it found is no pydantic model.
        """
        if info.config is None:
            return None
        owner = self.owner(info.name)
        kind = import_object(info.config, owner)
        from pydantic import BaseModel

        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            raise BackendBrokenError(f"{info.config} is not a pydantic model", whose=owner, cure=REPORT_IT)
        return kind

    def import_rules(self) -> dict[str, Mapping[str, Any]]:
        """Return how sections of other libraries' files are read: rules by key, by the section's name there.

        Raises:
            BackendBrokenError, BackendConflictError: rules cannot be imported, or two plugins bring some for one name.
        """
        self.load_all()
        return import_rules((plugin.owner, info) for plugin in self._plugins for info in plugin.infos)

    def load_all(self) -> None:
        """Import every plugin. May be called twice."""
        if not self._all_loaded:
            self._all_loaded = True
            for plugin in self._plugins:
                self._load(plugin)

    def register(self, plugin: object, *, name: str) -> None:
        """Add a plugin that is not installed: a module or object with hook implementations, for this process only.

        Raises:
            BackendBrokenError: a hook is misspelt or fails.
        """
        record = Plugin(name=name, value=f"registered in this process: {name}", distribution=name, version="")
        self._adopt(record, plugin)
        check_loaded(record)
        self._plugins.append(record)
        self._canonical.clear()
        self._unknown.clear()

    # ---- explaining ---------------------------------------------------------------------------------------------

    def reports(self) -> list[BackendReport]:
        """Say for each backend, broken ones included, whose it is, what it can do, and whether it can run here."""
        self.load_all()
        found = [BackendReport.of_broken(plugin) for plugin in self._plugins if plugin.broken]
        found += [self._report(plugin, info) for plugin in self._plugins for info in plugin.infos]
        return sorted(found, key=lambda report: (report.name, report.distribution))

    def plugins(self) -> list[PluginReport]:
        """Say for each plugin, backend or not, whose it is and which hooks it implements."""
        self.load_all()
        return [PluginReport.of(plugin, self._hooks_of(plugin)) for plugin in self._plugins]

    def _report(self, plugin: Plugin, info: BackendInfo) -> BackendReport:
        try:
            found, _ = self._find(info.name)
            if found is not plugin:
                raise BackendConflictError(
                    f"the name {info.name!r} belongs to {found.owner}, whose entry point it is",
                    whose=plugin.owner,
                    cure="Uninstall one of the two.",
                )
            check_contract(plugin, info)
            readiness = self.check_ready(info)
        except BackendError as error:
            return BackendReport.of(plugin, info, ready=False, why=error.what, cure=error.cure)
        return BackendReport.of(plugin, info, ready=True, why=readiness.reason)

    # ---- hooks --------------------------------------------------------------------------------------------------

    def listens(self, event: str) -> bool:
        """Whether any plugin observes this event (a hook's name without ``drivetrain_``)."""
        self.load_all()
        return bool(self._hook(event).get_hookimpls())

    def notify(self, event: str, **arguments: Any) -> None:
        """Tell every observer of an event. An exception is logged with the plugin's name; the others are still told."""
        self.load_all()
        for plugin in self._implementing(event):
            try:
                self._call(plugin, event, **arguments)
            except KeyboardInterrupt:
                raise
            except BaseException:  # sys.exit() of an observer must not end the training
                _logger.exception("plugin %s (%s) failed in %s%s", plugin.name, plugin.owner, _PREFIX, event)

    def trackers(self) -> dict[str, str]:
        """Return ``{"name": "package.module:Class"}`` of all plugins' experiment trackers, as :meth:`_targets`."""
        return self._targets("trackers", "tracker")

    def checkpoint_formats(self) -> dict[str, str]:
        """Return ``{"name": "package.module:Class"}`` of all plugins' checkpoint formats, as :meth:`_targets`."""
        return self._targets("checkpoint_formats", "checkpoint format")

    def devices(self) -> list[Mapping[str, str]]:
        """Return all plugins' descriptions of device kinds beyond those torch knows."""
        return [device for _, answer in self._collect("devices") for device in answer]

    def add_commands(self, group: click.Group) -> list[str]:
        """Let plugins add subcommands; return one sentence for each that failed or whose name was taken."""
        import click

        self.load_all()
        complaints: list[str] = []
        for plugin in self._implementing("commands"):
            scratch = click.Group(group.name)
            try:
                self._call(plugin, "commands", group=scratch)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                complaints.append(f"{plugin.owner} could not add its commands: {type(error).__name__}: {error}")
                _logger.debug("commands of %s", plugin.owner, exc_info=True)
                continue
            taken = set(scratch.commands) & set(group.list_commands(click.Context(group)))
            if taken:
                complaints.append(f"{plugin.owner} brings the command {listed(taken)}, which exists already")
            for name in set(scratch.commands) - taken:
                group.add_command(scratch.commands[name], name)
        return complaints

    def tensor_parallel_plan(self, model: nn.Module, degree: int) -> Mapping[str, str] | None:
        """Ask the plugins how to split a model along ``tp``: the first answer, or ``None``."""
        self.load_all()
        answer: Mapping[str, str] | None = self._first("tensor_parallel_plan", model=model, degree=degree)
        return answer

    def pipeline_split(self, model: nn.Module, num_stages: int) -> Sequence[str] | None:
        """Ask the plugins where a model's pipeline stages begin: the first answer, or ``None``."""
        self.load_all()
        answer: Sequence[str] | None = self._first("pipeline_split", model=model, num_stages=num_stages)
        return answer

    # ---- how it is done -----------------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[Plugin, BackendInfo]:
        """Return who brings a name. See :meth:`resolve` for what it raises."""
        wanted = name.lower()
        named = [plugin for plugin in self._plugins if plugin.name.lower() == wanted]
        if len({plugin.owner for plugin in named}) > 1:
            raise conflict(wanted, named)
        for plugin in named:
            self._load(plugin)
            check_loaded(plugin)
            for info in plugin.infos:
                if info.name == wanted:
                    return plugin, info
        self.load_all()
        pairs = [(plugin, info) for plugin in self._plugins for info in plugin.infos]
        for claims in (
            [pair for pair in pairs if pair[1].name == wanted],
            [pair for pair in pairs if wanted in {alias.lower() for alias in pair[1].aliases}],
        ):
            if len(claims) > 1:
                raise conflict(wanted, [plugin for plugin, _ in claims])
            if claims:
                return claims[0]
        raise not_found(name, self._plugins)

    def _load(self, plugin: Plugin) -> None:
        if plugin.loaded:
            return
        plugin.loaded = True
        try:
            module = importlib.import_module(plugin.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - recorded; even sys.exit() must not end the others
            plugin.fail(error, f"plugin {plugin.name!r} could not be imported")
            return
        self._adopt(plugin, module)

    def _adopt(self, plugin: Plugin, module: object) -> None:
        """Register what a plugin is made of and read its descriptions, or record why not."""
        plugin.loaded = True
        if self._manager.is_registered(module):  # a second entry point to one module: the first one answers for it
            return
        plugin.module = module
        try:
            check_marks(module)
            self._manager.register(module, name=f"{plugin.name} of {plugin.owner}")
            self._manager.check_pending()
            for answer in self._call(plugin, "backends"):
                plugin.infos += checked_infos(answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - recorded, shown, and raised when one of its names is asked for
            if self._manager.is_registered(module):
                self._manager.unregister(module)
            plugin.fail(error, f"plugin {plugin.name!r} cannot be used")

    def _hook(self, event: str) -> pluggy.HookCaller:
        hook: pluggy.HookCaller = getattr(self._manager.hook, _PREFIX + event)
        return hook

    def _targets(self, event: str, noun: str) -> dict[str, str]:
        """Return names and classes of one kind. Raises :class:`BackendConflictError` when two plugins claim a name."""
        found: dict[str, tuple[Plugin, str]] = {}
        for plugin, answer in self._collect(event):
            for name, target in dict(answer).items():
                if name in found:
                    raise BackendConflictError(
                        f"two plugins bring a {noun} named {name!r}: {found[name][0].owner} and {plugin.owner}",
                        cure="Uninstall one of the two.",
                    )
                found[name] = (plugin, target)
        return {name: target for name, (_, target) in sorted(found.items())}

    def _implementing(self, event: str) -> list[Plugin]:
        """Plugins that implement a hook, in the order of the registry."""
        modules = [implementation.plugin for implementation in self._hook(event).get_hookimpls()]
        return [plugin for plugin in self._plugins if any(plugin.module is module for module in modules)]

    def _call(self, plugin: Plugin, event: str, **arguments: Any) -> list[Any]:
        """Call one plugin's implementation of a hook."""
        others = [module for module in self._manager.get_plugins() if module is not plugin.module]
        answers: list[Any] = self._manager.subset_hook_caller(_PREFIX + event, others)(**arguments)
        return answers

    def _first(self, event: str, **arguments: Any) -> Any:
        """Ask all plugins until one answers. An exception passes, but none may end the process without a word."""
        try:
            return self._hook(event)(**arguments)
        except (KeyboardInterrupt, Exception):
            raise
        except BaseException as error:
            asked = listed(plugin.owner for plugin in self._implementing(event))
            what = f"a plugin raised {type(error).__name__} in the hook {_PREFIX}{event}; it is implemented by {asked}"
            raise BackendBrokenError(what, cure=REPORT_IT) from error

    def _collect(self, event: str) -> list[tuple[Plugin, Any]]:
        """Ask every plugin; one that raises is from now on broken."""
        self.load_all()
        found: list[tuple[Plugin, Any]] = []
        for plugin in self._implementing(event):
            try:
                found += [(plugin, answer) for answer in self._call(plugin, event)]
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - recorded, and said
                self._manager.unregister(plugin.module)
                plugin.fail(error, f"plugin {plugin.name!r} failed in the hook {_PREFIX}{event}")
                _logger.warning("%s [%s]; its other answers are not used either", plugin.reason, plugin.owner)
        return found

    def _hooks_of(self, plugin: Plugin) -> tuple[str, ...]:
        callers = self._manager.get_hookcallers(plugin.module) if plugin.module is not None else None
        return tuple(sorted(caller.name for caller in callers or ()))

