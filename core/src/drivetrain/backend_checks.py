"""Check that a backend can be used: its plugin, contract version and requirements."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drivetrain.backend import CONTRACT, BackendInfo, Readiness
from drivetrain.errors import (
    BackendBlockedError,
    BackendBrokenError,
    BackendConflictError,
    BackendNotFoundError,
    ContractMismatchError,
)
from drivetrain.installed import CORE, Plugin, known_extras, pip_line, unmet_requirements
from drivetrain.suggest import closest, listed, sentences

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
