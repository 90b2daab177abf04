"""The tests of ``pytest --drivetrain-model mymodule:build``: a user's model under every installed backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.registry import get_registry
from drivetrain_testing.kit import Kit, run_case, user_model_cases
from drivetrain_testing.outcomes import users_model


def _places() -> list[tuple[str, int]]:
    """Each backend that is ready and runs on the CPU, on each world it can fill."""
    found = []
    for report in get_registry().reports():
        can = report.capabilities
        if report.ready and can is not None and (not can.devices or "cpu" in can.devices):
            found += [(report.name, world_size) for world_size in ((1, 2) if can.multi_process else (1,))]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case in every place."""
    if not users_model(metafunc.config):
        raise pytest.UsageError("Bring a model: pytest --drivetrain-model mymodule:build")
    metafunc.parametrize(("backend", "world_size"), _places(), ids=str)
    metafunc.parametrize("case", list(user_model_cases()))


def test_users_model(
    request: pytest.FixtureRequest, backend: str, world_size: int, case: str, tmp_path: Path
) -> None:
    kit = Kit.plain(backend, tmp_path).with_model(users_model(request.config))
    run_case(case, kit, world_size)
