"""Draws from a stream of its own, beside the script's random numbers (drivetrain.data.orders.PrivateRandom)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from drivetrain.data import orders
from drivetrain.data.orders import PrivateRandom


@pytest.fixture(params=["in memory", "by getstate"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange Python's state as CPython keeps it, and as any other Python would."""
    if request.param == "by getstate":
        monkeypatch.setattr(orders, "_in_memory", lambda: False)
    else:
        assert orders._in_memory(), "this Python keeps its states elsewhere"


def _draw() -> list[float]:
    # gauss makes two numbers and keeps one for the next call.
    return [random.gauss(0, 1), random.random(), float(np.random.random()), float(torch.rand(()))]


def test_entries_draw_what_one_stream_would() -> None:
    """Two entries draw what the generators of that seed draw in one go, whatever the script draws in between."""
    private = PrivateRandom(5)
    drawn = []
    for _ in range(2):
        with private:
            drawn += _draw()
        _draw()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert drawn == _draw() + _draw()


def test_the_script_draws_on_as_without_an_entry() -> None:
    """An entry between two draws of the script changes neither, nor half a pair that Python keeps."""

    def run(private: PrivateRandom | None) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        drawn = _draw()
        if private is not None:
            with private:
                _draw()
        return drawn + _draw()

    assert run(PrivateRandom(7)) == run(None)


def test_an_error_inside_puts_the_states_back() -> None:
    """A read that raises leaves the script's generators where they were."""
    random.seed(1)
    before = random.getstate()
    with pytest.raises(ZeroDivisionError), PrivateRandom(7):
        1 / (random.random() * 0)
    assert random.getstate() == before
