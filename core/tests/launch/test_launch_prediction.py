"""A planner's part in a launch: a prediction before one, and advice after an error of memory. None is installed."""

from __future__ import annotations

import json
import sys

import pytest

from drivetrain.config import load_config
from drivetrain.errors import BackendNotFoundError, UsageError
from drivetrain.launch import script, worker
from drivetrain.launch.failures import read_failures
from drivetrain.launch.plan import LaunchPlan
from drivetrain.registry import Registry, pip_line

PLAN = LaunchPlan(2, 2, backend="ddp")


class Planner:
    """A registry that asks one planner.

    Args:
        answer: to every question; an exception is raised.
    """

    def __init__(self, answer):
        self._answer = answer

    def _asked(self, resolved, plan):
        assert plan is PLAN
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    predict = out_of_memory = _asked


@pytest.fixture
def planner(monkeypatch):
    def install(answer):
        monkeypatch.setattr(script, "get_registry", lambda: Planner(answer))

    return install


def test_a_check_needs_a_planner(monkeypatch):
    monkeypatch.setattr(script, "get_registry", lambda: Registry([]))
    with pytest.raises(BackendNotFoundError, match=r"plan\.check .* none is installed") as caught:
        script.predict(load_config(), PLAN)
    assert pip_line("planner") in str(caught.value)


def test_what_is_predicted_is_handed_on(planner):
    planner({"bytes": 3})
    assert script.predict(load_config(), PLAN) == {"bytes": 3}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("fsdp holds less", "fsdp holds less\n"),
        (None, pip_line("planner")),
        (UsageError("no machine"), "What other layouts hold could not be predicted: no machine"),
    ],
)
def test_advice_never_replaces_the_failure(planner, answer, said):
    planner(answer)
    assert said in script._memory_advice(load_config(), PLAN)


@pytest.mark.parametrize("how", ["itself", "caused", "beside", "words"])
def test_an_error_of_memory_is_recorded_by_its_type(tmp_path, monkeypatch, how):
    import torch

    error = torch.OutOfMemoryError("CUDA out of memory")
    if how == "caused":
        other = ValueError("the batch is too large")
        other.__cause__ = error
        error = other
    elif how == "beside":
        other = ValueError("something else, while that was handled")
        other.__context__ = error
        error = other
    elif how == "words":
        error = RuntimeError(str(error))
    (tmp_path / "rank_0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "rank_0/error.json"))
    monkeypatch.setenv("RANK", "0")
    worker.record_failure(type(error), error, None)
    assert "out_of_memory" in json.loads((tmp_path / "rank_0/error.json").read_text())["message"]["extraInfo"]
    (failure,) = read_failures({0: 1}, tmp_path)
    assert failure.out_of_memory == (how in ("itself", "caused"))


def test_a_script_without_torch_fails_as_before(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not worker._is_out_of_memory(MemoryError())
