"""Every test of every distribution runs under the hygiene plugin of the conformance kit."""

from __future__ import annotations

import os
from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import pytest

# Ranks share few cores, and a process that is forked after OpenMP made its threads hangs in its next parallel loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["drivetrain_testing.plugin"]

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Mark as slow what `make test` leaves out: by the marker `gate`, and in conformance modules."""
    _keep_named(items, whole=not any("::" in argument for argument in config.args))
    for item in items:
        requirements = getattr(getattr(item, "module", None), "Requirements", None)
        parameters = getattr(getattr(item, "callspec", None), "params", None)
        conformance = requirements is not None and parameters is not None
        if conformance and _left_out(item.originalname, parameters, requirements):
            item.add_marker(pytest.mark.slow)


def _keep_named(items: list[Any], *, whole: bool) -> None:
    """Mark the parameters of a test as slow that its marker `gate` does not name.

    Args:
        items: the tests.
        whole: tests were chosen by file or folder, so that all parameters of a test are here.
    """
    missing: dict[str, set[str]] = defaultdict(set)
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        marker = item.get_closest_marker("gate")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        matching = {name for name in marker.args if fnmatchcase(item.callspec.id, name)}
        missing[test].update(marker.args)
        found[test] |= matching
        if not matching:
            item.add_marker(pytest.mark.slow)
    for test, names in missing.items():
        if whole and names - found[test]:
            raise pytest.UsageError(f"{test} has no parameter {', '.join(sorted(names - found[test]))}: see its @gate")


def _left_out(test: str, parameters: dict[str, Any], requirements: Any) -> bool:
    """Whether a faster test of the same module shows nearly the same.

    Cases run on two processes where the backend takes several. Checkpoints travel between `single` and two processes;
    every pair of backends is in tests/parity, which is slow. Of the two moments of a killed save one is left.
    """
    quick = 2 if 2 in requirements.world_sizes else min(requirements.world_sizes)
    if test == "test_conformance":
        # A case with worlds of its own, as one on three ranks, has no other place.
        return bool(parameters["world_size"] != quick and parameters["world_size"] in requirements.world_sizes)
    if test in {"test_state_travels", "test_samples_after_resume"}:
        return any(place not in {("single", 1), (requirements.backend, quick)} for place in parameters["journey"])
    return test == "test_killed_save" and parameters["moment"] != "writing"
