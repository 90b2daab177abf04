"""Find, check, load and explain plugins: the only user of pluggy and of entry points.

A plugin is a module that an entry point of the group ``drivetrain`` names. Loading by name imports that plugin alone;
all are imported only for an alias, a listing, or a hook that anyone may implement. What goes wrong in one plugin is
recorded with its distribution and harms nobody else.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from drivetrain import backend_checks as checks
from drivetrain import hookspecs
from drivetrain.backend import Backend, BackendInfo, Readiness
from drivetrain.errors import BackendBrokenError, BackendConflictError, BackendError, BackendNotFoundError
from drivetrain.hookspecs import GROUP
from drivetrain.installed import BackendReport, Plugin, PluginReport, check_marks, checked_infos
from drivetrain.suggest import listed

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel
    from torch import nn

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
        checks.check_contract(plugin, info)
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
        raise checks.none_fits(world_size, self._plugins, reasons)

    # ---- loading ------------------------------------------------------------------------------------------------

    def check_ready(self, info: BackendInfo) -> Readiness:
        """Check that a backend can run here: its requirements, then its probe. Imports nothing heavy.

        Returns:
            The probe's answer, whose reason may be a remark.

        Raises:
            BackendBlockedError: a requirement is not met, or the probe says no.
            BackendBrokenError: the probe failed.
        """
        return checks.check_ready(self._find(info.name)[0], info)

    def load_backend(self, info: BackendInfo) -> type[Backend]:
        """Import and return a backend's class, after all checks.

        Raises:
            ContractMismatchError, BackendBlockedError: see :meth:`info` and :meth:`check_ready`.
            BackendBrokenError: the import failed, or what it found is no :class:`Backend`.
        """
        plugin, found = self._find(info.name)
        checks.check_contract(plugin, found)
        self.check_ready(info)
        kind = checks.import_object(info.backend, plugin.owner)
        if not (isinstance(kind, type) and issubclass(kind, Backend)):
            raise BackendBrokenError(
                f"{info.backend} is not a class derived from drivetrain.api.Backend",
                whose=plugin.owner,
                cure=checks.REPORT_IT,
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
        kind = checks.import_object(info.config, owner)
        from pydantic import BaseModel

        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            raise BackendBrokenError(f"{info.config} is not a pydantic model", whose=owner, cure=checks.REPORT_IT)
        return kind

    def import_rules(self) -> dict[str, Mapping[str, Any]]:
        """Return how sections of other libraries' files are read: rules by key, by the section's name there.

        Raises:
            BackendBrokenError, BackendConflictError: rules cannot be imported, or two plugins bring some for one name.
        """
        self.load_all()
        return checks.import_rules((plugin.owner, info) for plugin in self._plugins for info in plugin.infos)

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
        checks.check_loaded(record)
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
            checks.check_contract(plugin, info)
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
            raise checks.conflict(wanted, named)
        for plugin in named:
            self._load(plugin)
            checks.check_loaded(plugin)
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
                raise checks.conflict(wanted, [plugin for plugin, _ in claims])
            if claims:
                return claims[0]
        raise checks.not_found(name, self._plugins)

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
            raise BackendBrokenError(what, cure=checks.REPORT_IT) from error

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
