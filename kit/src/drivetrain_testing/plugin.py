"""A pytest plugin that fails tests which leave something behind, and skips tests marked ``gpu`` without a GPU.

Switch it on with ``pytest_plugins = ["drivetrain_testing.plugin"]`` in the top ``conftest.py``. It is no entry point of
pytest's, since that would act on the tests of everyone who has Drivetrain installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drivetrain_testing.hygiene import Snapshot


def pytest_configure(config: pytest.Config) -> None:
    """Register our marker, for ``--strict-markers``."""
    config.addinivalue_line(
        "markers", "gpu(count=1): needs accelerators; skips with the reason where there are too few"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` on a machine with too few devices, saying what torch found."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
    found, kind = _accelerators()
    if found < wanted:
        pytest.skip(f"needs {wanted} accelerator(s), torch {_torch_version()} finds {found} ({kind})")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaks environment variables, a process group, global torch settings or threads.

    Set up before a test's own fixtures and torn down after them, so what ``monkeypatch`` takes back is no leak.
    """
    before = Snapshot()
    yield
    leaks = before.differences()
    before.restore()
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _accelerators() -> tuple[int, str]:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return (0, "none") if device is None else (torch.accelerator.device_count(), device.type)


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
