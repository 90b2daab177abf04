"""What is installed, as data: a record for each plugin, what is reported about it, and facts about distributions."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata

from drivetrain import hookspecs
from drivetrain.backend import BackendInfo, Capabilities
from drivetrain.config.keys import CORE_KEYS, may_be_foreign
from drivetrain.suggest import did_you_mean, sentences

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


def known_extras() -> tuple[str, ...]:
    """Return the core's extras that stand for a backend: those that require ``drivetrain-<extra>``."""
    try:
        core = metadata.metadata(CORE)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ()
    required = {line.split(";")[0].strip().lower() for line in core.get_all("Requires-Dist") or ()}
    extras = core.get_all("Provides-Extra") or ()
    return tuple(extra for extra in extras if any(_names(line, f"{CORE}-{extra}") for line in required))


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
