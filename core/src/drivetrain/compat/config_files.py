"""Reads a configuration file of Accelerate: each key is converted, has no effect here, or is refused.

``drivetrain config import`` prints these decisions; loading a file applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from drivetrain.compat.config_rules import (
    EMPTY,
    RULES,
    SECTIONS,
    UNSUPPORTED_VALUES,
    Rule,
    Verdict,
    judge,
    judge_section,
)
from drivetrain.config.keys import CORE_KEYS, may_be_foreign
from drivetrain.config.problems import unknown_key
from drivetrain.errors import BackendError


class Importers(Protocol):
    """The part of the registry that is used here."""

    def resolve(self, name: str) -> str: ...
    def names(self) -> tuple[str, ...]: ...
    def import_rules(self) -> Mapping[str, Mapping[str, Rule]]: ...


def judge_key(key: str, value: Any, values: Mapping[str, Any], registry: Importers) -> list[Verdict]:
    """Convert a key for which :func:`may_be_foreign` holds; one result for each key inside it.

    Args:
        key: at the top of the file.
        value: what it holds.
        values: the whole file.
        registry: of the engines.
    """
    if key in RULES:
        return [judge(key, value, RULES[key])]
    if value in EMPTY and (key in SECTIONS or key in registry.import_rules()):
        return [Verdict(key, value, "no meaning here", "says nothing special")]
    if key in SECTIONS:
        return list(judge_section(key, value, SECTIONS[key]))
    rules = registry.import_rules().get(key)
    if rules is None:
        stranger = _stranger(key, value, values, registry)
        # Accelerate writes an empty section for each engine that it knows, installed here or not.
        return [replace(stranger, stops=stranger.stops and value not in (None, {}))]
    verdicts = list(judge_section(key, value, rules))
    # Another engine's settings do not affect this run.
    return [replace(each, stops=False) for each in verdicts] if _is_idle(key, values, registry) else verdicts


def _is_idle(section: str, values: Mapping[str, Any], registry: Importers) -> bool:
    """Whether the file chooses another backend than the one that reads this section."""
    chosen = values.get("distributed_type")
    try:
        engine = registry.resolve(section.removesuffix("_config"))
        return chosen is not None and registry.resolve("no" if chosen is False else str(chosen)) != engine
    except BackendError:
        return False  # an unknown name is reported at its place in the file


def judge_file(values: Mapping[str, Any], registry: Importers) -> list[Verdict]:
    """Convert every key of a file, ours included, in the order of the file."""
    verdicts: list[Verdict] = []
    for key, value in values.items():
        if may_be_foreign(key):
            verdicts += judge_key(key, value, values, registry)
        elif key in CORE_KEYS:
            verdicts.append(_own(key, value, registry))
        else:
            verdicts.append(_stranger(key, value, values, registry))
    return verdicts


def _own(key: str, value: Any, registry: Importers) -> Verdict:
    """A key that means the same here."""
    known = UNSUPPORTED_VALUES.get(key, {})
    if isinstance(value, str) and value.lower() in known:
        return Verdict(key, value, "not supported", known[value.lower()], stops=True)
    if key == "distributed_type":
        name = "no" if value is False else str(value)
        try:
            return Verdict(key, value, "carried over", "", {key: registry.resolve(name)})
        except BackendError as error:
            return Verdict(key, value, "not supported", str(error), stops=True)
    if value is None:
        return Verdict(key, value, "no meaning here", "says nothing special")
    return Verdict(key, value, "carried over", "", {key: value})


def _stranger(key: str, value: Any, values: Mapping[str, Any], registry: Importers) -> Verdict:
    """A backend's own section, the section of an engine that is not installed, or an unknown key."""
    engine = key.removesuffix("_config")
    try:
        name = registry.resolve(engine)
    except BackendError as error:
        if "pip install" not in error.cure:
            says = unknown_key(key, {*CORE_KEYS, *registry.names()})
        elif str(values.get("distributed_type", "")).lower() != engine.lower():
            # Accelerate's files hold sections of engines that the run does not use.
            return Verdict(key, value, "no meaning here", f"distributed_type is not {engine}, which is not installed")
        else:
            says = str(error)
        return Verdict(key, value, "not supported", says, stops=True)
    if name == key:
        return Verdict(key, value, "carried over", "", {key: value})
    return Verdict(key, value, "not supported", f"write a section '{name}:' with the backend's own keys", stops=True)
