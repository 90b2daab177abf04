"""Reads a configuration file of Accelerate: each key is converted, has no effect here, or is refused.

``drivetrain config import`` prints these decisions; loading a file applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.config.accelerate_rules import (
    EMPTY,
    RULES,
    SECTIONS,
    Verdict,
    judge,
    judge_section,
)
from drivetrain.config.keys import CORE_KEYS, may_be_foreign
from drivetrain.config.problems import unknown_top_key
from drivetrain.errors import BackendError

if TYPE_CHECKING:
    from drivetrain.registry import Registry


def judge_key(key: str, value: Any, values: Mapping[str, Any], registry: Registry) -> list[Verdict]:
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
    # Another engine's settings do not affect this run.
    idle = is_idle(key.removesuffix("_config"), values, registry)
    return [replace(each, stops=each.stops and not idle) for each in judge_section(key, value, rules)]


def chosen_backend(values: Mapping[str, Any]) -> str | None:
    """Return ``distributed_type`` if it is a name; YAML reads a bare ``no`` as False."""
    chosen = values.get("distributed_type")
    return "no" if chosen is False else chosen if isinstance(chosen, str) else None


def is_idle(engine: str, values: Mapping[str, Any], registry: Registry) -> bool:
    """Whether the file chooses another backend than this one."""
    chosen = chosen_backend(values)
    try:
        return chosen is not None and registry.resolve(chosen) != registry.resolve(engine)
    except BackendError:
        return False  # `auto`, or an unknown name, which is reported at its place in the file


def judge_file(values: Mapping[str, Any], registry: Registry) -> list[Verdict]:
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


def _own(key: str, value: Any, registry: Registry) -> Verdict:
    """A key that means the same here."""
    if key == "mixed_precision" and str(value).lower() == "fp8":
        return Verdict(key, value, "not supported", "fp8 is not supported; write bf16 (or fp16, or 'no')", stops=True)
    if key == "distributed_type":
        name = "no" if value is False else str(value)
        try:
            return Verdict(key, value, "carried over", "", {key: registry.resolve(name)})
        except BackendError as error:
            return Verdict(key, value, "not supported", str(error), stops=True)
    if value is None:
        return Verdict(key, value, "no meaning here", "says nothing special")
    return Verdict(key, value, "carried over", "", {key: value})


def _stranger(key: str, value: Any, values: Mapping[str, Any], registry: Registry) -> Verdict:
    """A backend's own section, the section of an engine that is not installed, or an unknown key."""
    engine = key.removesuffix("_config")
    try:
        name = registry.resolve(engine)
    except BackendError as error:
        if "pip install" not in error.cure:
            says = unknown_top_key(key, registry)
        elif str(values.get("distributed_type", "")).lower() != engine.lower():
            # Accelerate's files hold sections of engines that the run does not use.
            return Verdict(key, value, "no meaning here", f"distributed_type is not {engine}, which is not installed")
        else:
            says = str(error)
        return Verdict(key, value, "not supported", says, stops=True)
    if name == key:
        return Verdict(key, value, "carried over", "", {key: value})
    return Verdict(key, value, "not supported", f"write a section '{name}:' with the backend's own keys", stops=True)
