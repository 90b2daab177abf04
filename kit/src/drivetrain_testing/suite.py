"""The tests that a backend must pass.

A plugin's whole conformance test is::

    from drivetrain_testing.suite import *  # noqa: F403

    class Requirements(BaseRequirements):
        backend = "ddp"
        world_sizes = (1, 2)

Every case of :mod:`drivetrain_testing.cases` then runs on every world size. What a backend does not do it says by a
capability, and a case about that capability expects the documented refusal; what is left goes into ``gaps``, each with
its reason. Nothing else switches a test off: one that is left out, replaced or skipped fails the run, see
:mod:`drivetrain_testing.outcomes`, which prints the closing table.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from drivetrain_testing import outcomes, selection
from drivetrain_testing.cases import state as state_cases
from drivetrain_testing.kit import Kit, passed_together, run_case, run_in_rank
from drivetrain_testing.processes import RankFailedError, spawn
from drivetrain_testing.requirements import BaseRequirements, mistakes
from drivetrain_testing.scenario import assert_same_state, reference

T = TypeVar("T")

LIGHT_PLUGIN = """
import sys, time
from importlib.metadata import entry_points
import drivetrain.api
(found,) = [point for point in entry_points(group="drivetrain") if point.name == sys.argv[1]]
start = time.process_time()
found.load()
seconds = time.process_time() - start
heavy = [name for name in ("torch", "numpy", "deepspeed", "megatron", "torch_xla") if name in sys.modules]
assert not heavy, f"importing {found.value} imports {', '.join(heavy)}"
assert seconds < 0.1, f"importing {found.value} takes {1000 * seconds:.0f} ms of processor time, more than 100"
"""
"""Processor time, which a busy machine does not stretch much; the plugins beside this core take 1 to 23 ms."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the suite's tests their cases and worlds, as the module's ``Requirements`` say."""
    requirements = getattr(metafunc.module, "Requirements", None)
    if requirements is None:
        return
    outcomes.watch(metafunc.config, metafunc.module)
    name = metafunc.function.__name__
    if name in selection.TESTS:
        names, parameters = selection.parameters(name, requirements, outcomes.users_model(metafunc.config))
        if names:
            metafunc.parametrize(names, parameters)


TOGETHER = 50
"""Maximum number of cases that share a group of ranks: a failure ends its group, whose other cases then run on ranks of
their own."""

_PASSED = pytest.StashKey[dict[tuple[str, int, str], frozenset[str]]]()
"""For each module, world and first case of a group, the cases that passed in it."""


def test_conformance(request: pytest.FixtureRequest, conformance_case: str, world_size: int, tmp_path: Path) -> None:
    requirements = request.module.Requirements
    if requirements.shared_ranks and conformance_case in _passed_together(request, conformance_case, world_size):
        return
    run_case(conformance_case, _kit(request, world_size, tmp_path), world_size)


def _kit(request: pytest.FixtureRequest, world_size: int, folder: Path) -> Kit:
    kit = Kit.of(request.module.Requirements, world_size, folder, outcomes.users_model(request.config))
    return replace(kit, timeout=_seconds(request))


def _seconds(request: pytest.FixtureRequest) -> float:
    """Return the timeout of the ranks of one case in seconds."""
    return float(request.config.getoption("drivetrain_timeout"))


def _passed_together(request: pytest.FixtureRequest, case: str, world_size: int) -> frozenset[str]:
    """Return the cases that passed in the group of a case, which runs when the first of its cases is asked for."""
    known = request.session.stash.setdefault(_PASSED, {})
    group = next((group for group in _groups(request, world_size) if case in group), [])
    if len(group) < 2:
        return frozenset()
    key = (request.module.__name__, world_size, group[0])
    if key not in known:
        folders = request.getfixturevalue("tmp_path_factory").mktemp
        kits = {name: _kit(request, world_size, folders(name)) for name in group}
        known[key] = passed_together(kits, world_size, folders("together"))
    return known[key]


def _groups(request: pytest.FixtureRequest, world_size: int) -> list[list[str]]:
    """The cases of this module and world that this session runs, but for declared gaps, cut into groups."""
    wanted = [
        str(item.callspec.params["conformance_case"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and item.originalname == "test_conformance"
        and item.callspec.params["world_size"] == world_size
        and item.get_closest_marker("xfail") is None
    ]
    return [wanted[begin : begin + TOGETHER] for begin in range(0, len(wanted), TOGETHER)]


_FIRST_PARTS = pytest.StashKey[dict[tuple[str, str, selection.Place], tuple[list[Any], Path]]]()
"""For each module, first part and source: what its ranks returned, and the folder that they saved into."""


def _kit_at(request: pytest.FixtureRequest, place: selection.Place, folder: Path) -> Kit:
    backend, world_size = place
    kit = _kit(request, world_size, folder)
    return kit if backend == kit.backend else Kit.plain(backend, folder, kit.atol)


def _first_part(
    request: pytest.FixtureRequest, part: Callable[[Kit], T], source: selection.Place
) -> tuple[list[T], Path]:
    """Return the results of the source's ranks, and the folder that they saved into; run once for all targets."""
    known = request.session.stash.setdefault(_FIRST_PARTS, {})
    key = (request.module.__name__, part.__name__, source)
    if key not in known:
        folder = request.getfixturevalue("tmp_path_factory").mktemp("first-part")
        known[key] = (
            spawn(run_in_rank, source[1], part, _kit_at(request, source, folder), timeout=_seconds(request)),
            folder,
        )
    return known[key]


def _second_part(
    request: pytest.FixtureRequest, part: Callable[[Kit], T], target: selection.Place, saved: Path, folder: Path
) -> list[T]:
    """Return the results of the target's ranks, on a copy of the folder, which other targets read too."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return spawn(run_in_rank, target[1], part, _kit_at(request, target, folder), timeout=_seconds(request))


def test_state_travels(request: pytest.FixtureRequest, journey: Any, tmp_path: Path) -> None:
    """A run saved in one place and resumed in another ends where the uninterrupted run and plain torch end.

    So does the state of a model with batch norms, whose buffers are part of it. Places are this backend's worlds,
    ``single``, and every other installed backend that is ready.
    """
    source, target = journey
    uninterrupted, folder = _first_part(request, state_cases.departure, source)
    resumed = _second_part(request, state_cases.arrival, target, folder, tmp_path)
    expected, atol = reference(state_cases.RUN).state, request.module.Requirements.atol
    for end, _ in (*uninterrupted, *resumed):
        assert_same_state(end, expected, max(atol, 1e-5))
    # Two places add in another order, which shows in the last bits.
    assert_same_state(resumed[0][0], uninterrupted[0][0], max(atol, 2e-6))
    for _, loaded in resumed:
        state_cases.assert_arrived(uninterrupted[0][1], loaded)


def test_samples_after_resume(request: pytest.FixtureRequest, journey: Any, tmp_path: Path) -> None:
    """The rest of a shuffled epoch, resumed in another world, shows what was not shown yet, each sample once."""
    source, target = journey
    first, saved = _first_part(request, state_cases.shuffled_first, source)
    seen = first[0]
    rest, following = _second_part(request, state_cases.shuffled_rest, target, saved, tmp_path)[0]
    total = state_cases.GLOBAL_BATCH * state_cases.MICRO_STEPS
    assert len(seen) == state_cases.GLOBAL_BATCH * state_cases.CUT
    assert sorted(seen + rest) == list(range(total))
    assert sorted(following) == list(range(total))
    assert following != seen + rest, "two epochs in the same order"


def test_killed_save(request: pytest.FixtureRequest, moment: str, tmp_path: Path) -> None:
    """A rank that is killed in the middle of a save costs that save only: the one before it is resumed.

    Guards against allennlp#2129 and petuum/adaptdl#70.
    """
    world_size = max(request.module.Requirements.world_sizes)
    kit = _kit(request, world_size, tmp_path)
    with pytest.raises(RankFailedError):
        spawn(run_in_rank, world_size, state_cases.killed_parts[moment], kit, timeout=_seconds(request))
    assert (tmp_path / "killed").exists(), "the save was over before anybody was killed"
    for end in spawn(run_in_rank, world_size, state_cases.second_part, kit, timeout=_seconds(request)):
        assert_same_state(end, reference(state_cases.RUN).state, max(kit.atol, 1e-5))


def test_plugin_is_light(request: pytest.FixtureRequest) -> None:
    """Importing the module that describes the backend imports no torch and no engine, and takes less than 100 ms."""
    requirements = request.module.Requirements
    if requirements.setup:
        pytest.skip(outcomes.NOT_INSTALLED)
    subprocess.run([sys.executable, "-c", LIGHT_PLUGIN, requirements.backend], check=True, timeout=_seconds(request))


def test_described_as_it_is(request: pytest.FixtureRequest) -> None:
    """Name and aliases lead to the backend in any case, its class can be imported, and both declare the same."""
    requirements = request.module.Requirements
    wrong = selection.disagreements(requirements)
    assert not wrong, "; ".join(wrong)


def test_requirements_say_what_they_mean(request: pytest.FixtureRequest) -> None:
    """Gaps name cases and have reasons, nothing is misspelt, and enough is tested."""
    requirements = request.module.Requirements
    info, _, _ = selection.description(requirements)
    model = outcomes.users_model(request.config)
    found = mistakes(requirements, info.capabilities, selection.chosen(requirements, model))
    assert not found, "; ".join(found)


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
    "test_described_as_it_is",
    "test_killed_save",
    "test_plugin_is_light",
    "test_requirements_say_what_they_mean",
    "test_samples_after_resume",
    "test_state_travels",
    "test_suite_is_whole",
]
assert {name for name in __all__ if name.startswith("test_")} == set(selection.TESTS)
