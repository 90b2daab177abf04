"""How far predictions are from what was counted and from what others published: the records, and what they must hold.

``planner_grid.py`` and ``public_runs.py`` beside this file write them; test_planner_memory.py runs the ranks again.
"""

from __future__ import annotations

import pytest
from planner_grid import combinations, record
from public_runs import GIB, estimate, rows
from public_runs import record as published

from drivetrain_planner.choosing import SHARE
from drivetrain_planner.machines import MACHINES


def errors_of(found):
    return {name: abs(each["predicted"] / each["counted"] - 1) for name, each in found.items()}


def test_counted_bytes_are_predicted():
    errors = errors_of(record())
    assert len(errors) >= 60
    assert {name.split(";")[0] for name in errors} == {"gpt2", "llama", "qwen3_moe", "vit", "t5", "resnet"}
    assert sum(errors.values()) / len(errors) <= 0.03
    assert max(errors.values()) <= 0.08, max(errors, key=errors.get)


def test_the_record_is_of_the_combinations():
    assert set(record()) <= {each.name for each in combinations()}


@pytest.mark.parametrize(
    "part",
    [
        ("resnet", "zero 2", 2, 3),
        pytest.param(("gpt2", "zero 1", 2, 2), marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", "fsdp", 2, 1), marks=pytest.mark.slow),
    ],
)
def test_a_prediction_is_what_the_record_says(part):
    """So that the record follows the estimates: ``planner_grid.py --predict`` writes it anew."""
    model, title, ranks, windows = part
    (one,) = [
        each
        for each in combinations()
        if (each.model, each.title, each.ranks, each.windows, each.precision) == (model, title, ranks, windows, "no")
    ]
    assert one.estimate().peak == record()[one.name]["predicted"]


def held_out():
    return [row for row in rows() if row["name"] in published() and not row["seen"] and row["gib"] is not None]


def test_published_runs_are_predicted():
    errors = [abs(published()[row["name"]]["reserved"] / GIB / row["gib"] - 1) for row in held_out()]
    assert len(errors) >= 3
    assert sum(errors) / len(errors) <= 0.05
    assert max(errors) <= 0.12


def test_no_run_that_ended_for_lack_of_memory_is_said_to_fit():
    ended = [row for row in rows() if row["gib"] is None and row["name"] in published()]
    assert ended
    for row in ended:
        held = published()[row["name"]]["peak"] + MACHINES["h100"].context
        assert held > SHARE * row["device"] * GIB, row["name"]


@pytest.mark.slow
def test_a_published_run_is_predicted_as_the_record_says():
    row = rows()[0]
    found = estimate(row)
    told = published()[row["name"]]
    assert (found.peak, found.peak + found.trace.unused) == (told["peak"], told["reserved"])
