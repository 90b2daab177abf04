"""Settings of Trainer do what they do with stock Trainer on one process: under single, and over two processes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import feature_jobs
import pytest
import torch

from drivetrain_testing import spawn

if find_spec("accelerate") is None or find_spec("transformers") is None:
    pytest.skip("Transformers and Accelerate are not installed", allow_module_level=True)

TOLERANCE = 2e-6
"""As in test_trainer_backends.py."""

PLACES = {"single": 1, "ddp": 2}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return spawn(feature_jobs.run, 1, None, str(tmp_path_factory.mktemp("stock")), timeout=240)[0]


@pytest.fixture(scope="module", params=["single", pytest.param("ddp", marks=pytest.mark.slow)])
def place(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp(request.param))
    return spawn(feature_jobs.run, PLACES[request.param], request.param, folder, PLACES[request.param], timeout=240)


def assert_same(one: Any, other: Any, where: str) -> None:
    """Numbers within the tolerance; all else equal."""
    if isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key, value in other.items():
            assert_same(one[key], value, f"{where}.{key}")
    elif isinstance(other, list | tuple):
        assert len(one) == len(other), (where, one, other)
        for index, value in enumerate(other):
            assert_same(one[index], value, f"{where}[{index}]")
    elif isinstance(other, float | torch.Tensor):
        found, expected = torch.as_tensor(one), torch.as_tensor(other)
        assert torch.allclose(found, expected, rtol=5e-6, atol=TOLERANCE, equal_nan=True), (where, one, other)
    else:
        assert one == other, (where, one, other)


@pytest.mark.parametrize("feature", [each.__name__ for each in feature_jobs.FEATURES])
def test_feature(feature: str, stock: dict[str, Any], place: list[dict[str, Any]]) -> None:
    expected = stock[feature]
    assert not isinstance(expected, str), expected
    for rank, found in enumerate(place):
        assert not isinstance(found[feature], str), found[feature]
        if feature == "hub" and rank:
            assert found[feature] == ([], False), "the main process alone uploads"
        else:
            few = len(found[feature]) if feature == "neftune" else None
            assert_same(found[feature], expected[:few] if few else expected, feature)
