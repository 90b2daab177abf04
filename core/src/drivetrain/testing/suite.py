"""The conformance suite.

A plugin's whole conformance test is::

    from drivetrain.testing.suite import *  # noqa: F403

    class Requirements(BaseRequirements):
        backend = "ddp"
        world_sizes = (1, 2)

Every case of :mod:`drivetrain.testing.cases` then runs on every world size. What a backend does not do it says by a
capability, and a case about that capability expects the documented refusal; what is left goes into ``gaps``, each with
its reason. A case is not to be replaced by a test of the same name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drivetrain.backend import Capabilities
from drivetrain.registry import get_registry, reset_registry
from drivetrain.testing.cases import state as state_cases
from drivetrain.testing.kit import Kit, all_cases, prepare_rank, run_case, run_in_rank
from drivetrain.testing.processes import spawn
from drivetrain.testing.requirements import BaseRequirements
from drivetrain.testing.scenario import assert_same_state, reference
from drivetrain.testing.together import passed_together

LIGHT_PLUGIN = """
import sys
from importlib.metadata import entry_points
before = set(sys.modules)
(found,) = [point for point in entry_points(group="drivetrain") if point.name == sys.argv[1]]
found.load()
heavy = [name for name in ("torch", "numpy", "deepspeed", "megatron", "torch_xla") if name in sys.modules]
assert not heavy, f"importing {found.value} imports {', '.join(heavy)}"
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the suite's tests their cases and worlds, as the module's ``Requirements`` say."""
    requirements = getattr(metafunc.module, "Requirements", None)
    if requirements is None:
        return
    if "conformance_case" in metafunc.fixturenames:
        metafunc.parametrize(("conformance_case", "world_size"), _cases(requirements))
    if "journey" in metafunc.fixturenames:
        metafunc.parametrize("journey", _journeys(requirements))


def _cases(requirements: type[BaseRequirements]) -> list[Any]:
    capabilities = _capabilities(requirements)
    chosen = []
    for case in all_cases().values():
        if not case.applies(capabilities):
            continue
        # A case with worlds of its own says what happens in one that the backend is not made for.
        for world_size in case.world_sizes or requirements.world_sizes:
            gap = requirements.gaps.get(case.name)
            marks = [pytest.mark.xfail(reason=gap, strict=True)] if gap else []
            name = f"{case.name}-{world_size}"
            chosen.append(pytest.param(case.name, world_size, id=name, marks=marks))
    return chosen


def _capabilities(requirements: type[BaseRequirements]) -> Capabilities:
    """What the backend declares. One that ``setup`` registers is forgotten again: other tests must not find it."""
    prepare_rank(requirements.setup)
    try:
        return get_registry().info(requirements.backend).capabilities
    finally:
        if requirements.setup:
            reset_registry()


def _journeys(requirements: type[BaseRequirements]) -> list[Any]:
    """From each world to each, and to and from the reference backend."""
    places = [(requirements.backend, world_size) for world_size in requirements.world_sizes]
    if ("single", 1) not in places:
        places.append(("single", 1))
    return [
        pytest.param((source, target), id=f"{source[0]}-{source[1]}-to-{target[0]}-{target[1]}")
        for source in places
        for target in places
        if requirements.backend in (source[0], target[0])
    ]


_TOGETHER = pytest.StashKey[dict[tuple[str, str, int], frozenset[str]]]()
"""For each module, room and world the cases that passed in one group of ranks."""


def test_conformance(request: pytest.FixtureRequest, conformance_case: str, world_size: int, tmp_path: Path) -> None:
    requirements = request.module.Requirements
    if requirements.shared_ranks and conformance_case in _passed_together(request, conformance_case, world_size):
        return
    run_case(conformance_case, Kit.of(requirements, world_size, tmp_path), world_size)


def _passed_together(request: pytest.FixtureRequest, case: str, world_size: int) -> frozenset[str]:
    """What passed of this session's tests of a room in a world; they run when the first of them is asked for."""
    known = request.session.stash.setdefault(_TOGETHER, {})
    room, _, _ = case.partition(".")
    key = (request.module.__name__, room, world_size)
    if key not in known:
        wanted = [
            str(item.callspec.params["conformance_case"])
            for item in request.session.items
            if isinstance(item, pytest.Function)
            and item.module is request.module
            and item.originalname == "test_conformance"
            and item.callspec.params["world_size"] == world_size
            and str(item.callspec.params["conformance_case"]).startswith(f"{room}.")
            and item.get_closest_marker("xfail") is None
        ]
        folders = request.getfixturevalue("tmp_path_factory").mktemp
        kits = {name: Kit.of(request.module.Requirements, world_size, folders(name)) for name in wanted}
        known[key] = passed_together(kits, world_size, folders("together")) if len(kits) > 1 else frozenset()
    return known[key]


def _kits(module: ModuleType, journey: Any, folder: Path) -> list[tuple[Kit, int]]:
    kits = []
    for backend, world_size in journey:
        kit = Kit.of(module.Requirements, world_size, folder)
        if backend != kit.backend:
            kit = Kit(backend, {"distributed_type": backend, "use_cpu": True}, {}, kit.atol, "", str(folder))
        kits.append((kit, world_size))
    return kits


def test_state_travels(request: pytest.FixtureRequest, journey: Any, tmp_path: Path) -> None:
    """A run saved in one world and resumed in another ends where the uninterrupted run and plain torch end."""
    (source, source_size), (target, target_size) = _kits(request.module, journey, tmp_path)
    uninterrupted = spawn(run_in_rank, source_size, state_cases.first_part, source)
    resumed = spawn(run_in_rank, target_size, state_cases.second_part, target)
    expected = reference(state_cases.RUN).state
    for end in (*uninterrupted, *resumed):
        assert_same_state(end, expected, max(source.atol, 1e-5))
    assert_same_state(resumed[0], uninterrupted[0], max(source.atol, 1e-6))


def test_samples_after_resume(request: pytest.FixtureRequest, journey: Any, tmp_path: Path) -> None:
    """The rest of a shuffled epoch, resumed in another world, shows what was not shown yet, each sample once."""
    (source, source_size), (target, target_size) = _kits(request.module, journey, tmp_path)
    seen = spawn(run_in_rank, source_size, state_cases.shuffled_first, source)[0]
    rest, following = spawn(run_in_rank, target_size, state_cases.shuffled_rest, target)[0]
    total = state_cases.GLOBAL_BATCH * state_cases.MICRO_STEPS
    assert len(seen) == state_cases.GLOBAL_BATCH * state_cases.CUT
    assert sorted(seen + rest) == list(range(total))
    assert sorted(following) == list(range(total))
    assert following != seen + rest, "two epochs in the same order"


def test_plugin_is_light(request: pytest.FixtureRequest) -> None:
    """Importing the module that describes the backend imports neither torch nor an engine."""
    requirements = request.module.Requirements
    if requirements.setup:
        pytest.skip("the backend is registered by the test, not installed")
    subprocess.run([sys.executable, "-c", LIGHT_PLUGIN, requirements.backend], check=True, timeout=60)


def test_gaps_name_cases(request: pytest.FixtureRequest) -> None:
    """A gap that names no case would hide nothing and mislead; so would one without a reason."""
    gaps = request.module.Requirements.gaps
    unknown = sorted(set(gaps) - set(all_cases()))
    assert not unknown, f"gaps that name no case: {', '.join(unknown)}"
    assert all(reason.strip() for reason in gaps.values()), "a gap without a reason"


def test_suite_is_whole(request: pytest.FixtureRequest) -> None:
    """No test of the suite was replaced by another of the same name."""
    replaced = [
        name
        for name in __all__
        if name.startswith(("test_", "pytest_")) and getattr(request.module, name, None) is not globals()[name]
    ]
    assert not replaced, f"replaced: {', '.join(replaced)}; declare a gap with its reason instead"


__all__ = [
    "BaseRequirements",
    "pytest_generate_tests",
    "test_conformance",
    "test_gaps_name_cases",
    "test_plugin_is_light",
    "test_samples_after_resume",
    "test_state_travels",
    "test_suite_is_whole",
]
