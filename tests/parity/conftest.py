"""Where a training run can happen on this machine: every installed backend that is ready, on each world it can fill."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from drivetrain.registry import get_registry
from drivetrain_testing import preload

if find_spec("deepspeed") is not None:
    # Slow to import; the second is imported by the first engine of a process.
    preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)

WORLD_SIZES = (1, 2, 4)


def places() -> list[tuple[str, int]]:
    """``(backend, world size)`` of every place on the CPU; a new plugin joins by being installed."""
    found = []
    for report in get_registry().reports():
        if not report.ready:
            continue
        capabilities = get_registry().info(report.name).capabilities
        if capabilities.devices and "cpu" not in capabilities.devices:
            continue
        sizes = WORLD_SIZES if capabilities.multi_process else (1,)
        found += [(report.name, world_size) for world_size in sizes]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", places(), ids=lambda place: f"{place[0]}-{place[1]}")
