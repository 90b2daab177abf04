"""What ``pytest --drivetrain-model mymodule:build`` runs: the model under every installed backend, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.registry import get_registry
from drivetrain_testing.kit import Kit, brought_cases, run_case
from drivetrain_testing.outcomes import brought_model


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
    if not brought_model(metafunc.config):
        raise pytest.UsageError("Bring a model: pytest --drivetrain-model mymodule:build")
    metafunc.parametrize(("backend", "world_size"), _places(), ids=str)
    metafunc.parametrize("case", list(brought_cases()))


def test_brought_model(
    request: pytest.FixtureRequest, backend: str, world_size: int, case: str, tmp_path: Path
) -> None:
    kit = Kit.plain(backend, tmp_path).with_model(brought_model(request.config))
    run_case(case, kit, world_size)
