"""Chooses the cases and the pairs of save and resume that a conformance module's ``Requirements`` ask for."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import deprecations
from drivetrain.backend import CONTRACT, BackendInfo, Capabilities
from drivetrain.registry import get_registry, reset_registry
from drivetrain_testing.kit import Case, all_cases, prepare_rank, user_model_cases
from drivetrain_testing.requirements import BaseRequirements

Place = tuple[str, int]
"""A backend and a world size."""


def description(requirements: type[BaseRequirements]) -> tuple[BackendInfo, str, str]:
    """Return the description of the backend, its distribution and version.

    One that ``setup`` registers is removed again: other tests must not find it. It has no version.
    """
    prepare_rank(requirements.setup)
    registry = get_registry()
    try:
        info = registry.info(requirements.backend)
        for report in () if requirements.setup else registry.reports():
            if report.name == info.name:
                return info, report.distribution, report.version
        return info, registry.owner(info.name), ""
    finally:
        if requirements.setup:
            reset_registry()


def applying(capabilities: Capabilities) -> dict[str, Case]:
    """The standard cases that make sense for a backend of these capabilities."""
    return {name: case for name, case in all_cases().items() if case.applies(capabilities)}


def chosen(requirements: type[BaseRequirements], model: str = "") -> dict[str, Case]:
    """The cases that run: those that apply, and those for a user's model where there is one."""
    info, _, _ = description(requirements)
    return applying(info.capabilities) | (user_model_cases() if model or requirements.model else {})


def gaps(requirements: type[BaseRequirements]) -> dict[str, str]:
    """The declared gaps, in today's form."""
    found = dict(requirements.gaps)
    if requirements.unused_parameters is None:
        found.setdefault("gradients.unused_parameters", "declared by unused_parameters = None")
    return found


def cases(requirements: type[BaseRequirements], model: str = "") -> list[Any]:
    """A parameter for each case and world, named ``family.case-world``; a declared gap is a strict expected failure.

    Args:
        requirements: the module's.
        model: ``"module:build"`` of a model named on the command line.
    """
    if requirements.unused_parameters is None:
        deprecations.warn("unused_parameters")
    declared = gaps(requirements)
    found = []
    for case in chosen(requirements, model).values():
        # A case with worlds of its own says what happens in one that the backend is not made for.
        for world_size in case.world_sizes or requirements.world_sizes:
            reason = declared.get(case.name)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            found.append(pytest.param(case.name, world_size, id=f"{case.name}-{world_size}", marks=marks))
    return found


def journeys(requirements: type[BaseRequirements]) -> list[tuple[Place, Place]]:
    """From each of the backend's worlds to each, and to and from the reference backend."""
    own = [(requirements.backend, world_size) for world_size in requirements.world_sizes]
    places = [*own, *({("single", 1)} - set(own))]
    return [(source, target) for source in places for target in places if source in own or target in own]


def neighbours(requirements: type[BaseRequirements]) -> list[tuple[Place, Place]]:
    """From the backend's largest world to every other installed backend that is ready, and from there to here."""
    home = (requirements.backend, max(requirements.world_sizes))
    found: list[tuple[Place, Place]] = []
    for report in get_registry().reports():
        can = report.capabilities
        if not report.ready or can is None or report.name in {"single", requirements.backend}:
            continue
        if can.devices and "cpu" not in can.devices:
            continue
        there = (report.name, 2 if can.multi_process else 1)
        found += [(home, there), (there, home)]
    return found


def named(journey: tuple[Place, Place]) -> str:
    """``ddp-2-to-single-1``."""
    (source, source_size), (target, target_size) = journey
    return f"{source}-{source_size}-to-{target}-{target_size}"


TESTS: dict[str, str] = {
    "test_conformance": "conformance",
    "test_state_travels": "journeys and neighbours",
    "test_samples_after_resume": "journeys",
    "test_killed_save": "moments",
    "test_plugin_is_light": "",
    "test_described_as_it_is": "",
    "test_requirements_say_what_they_mean": "",
    "test_suite_is_whole": "",
}
"""The suite's tests, and what each is repeated for."""


def parameters(test: str, requirements: type[BaseRequirements], model: str = "") -> tuple[str, list[Any]]:
    """Argument names and values of one of the suite's tests; no names for a test that runs once."""
    repeated = TESTS[test]
    if repeated == "conformance":
        return "conformance_case,world_size", cases(requirements, model)
    if repeated == "moments":
        return "moment", ["writing", "completing"]
    found = journeys(requirements) if "journeys" in repeated else []
    found += neighbours(requirements) if "neighbours" in repeated else []
    return ("journey" if found else ""), [pytest.param(journey, id=named(journey)) for journey in found]


def expected(requirements: type[BaseRequirements], model: str = "") -> set[tuple[str, str]]:
    """Every test of the suite and its parameters' name, empty for one that runs once: what must have run at the end."""
    found: set[tuple[str, str]] = set()
    for test in TESTS:
        names, values = parameters(test, requirements, model)
        found |= {(test, getattr(each, "id", None) or str(each)) for each in values} if names else {(test, "")}
    return found


def disagreements(requirements: type[BaseRequirements]) -> list[str]:
    """Return the wrong statements of a backend's description."""
    prepare_rank(requirements.setup)
    registry = get_registry()
    try:
        info = registry.info(requirements.backend)
        wrong = [
            f"{written!r} does not lead to {info.name!r}"
            for name in (info.name, *info.aliases)
            for written in {name.lower(), name.upper()}
            if registry.resolve(written) != info.name
        ]
        if info.api != CONTRACT:
            wrong.append(f"speaks version {info.api} of the contract, this kit tests version {CONTRACT}")
        kind = registry.load_backend(info)
        if kind.capabilities != info.capabilities:
            wrong.append(f"{info.backend} declares other capabilities than the description")
        registry.load_section(info)
        return wrong
    finally:
        if requirements.setup:
            reset_registry()
