"""How far predictions are from what was counted and from what others published: the records, and what they must hold.

``planner_grid.py``, ``public_runs.py`` and ``device_runs.py`` beside this file write them; test_planner_memory.py runs
the ranks again.
"""

from __future__ import annotations

import device_runs
import pytest
from planner_grid import combinations, record
from public_runs import GIB, planned, rows
from public_runs import record as published
from scipy.stats import kendalltau

from drivetrain_planner.choosing import SHARE, seconds
from drivetrain_planner.machines import MACHINES, find


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
    # A full allocator gives back what it keeps beside tensors, so that no process reserves more than its device has.
    held = {row["name"]: min(published()[row["name"]]["reserved"] / GIB, row["device"]) for row in held_out()}
    errors = [abs(held[row["name"]] / row["gib"] - 1) for row in held_out()]
    assert len(errors) >= 9
    assert sum(errors) / len(errors) <= 0.05
    assert max(errors) <= 0.12


def test_published_runs_are_put_in_order():
    """By Kendall's tau of the predicted and the published seconds of a step."""
    timed = [row for row in rows() if row["seconds"] is not None]
    for most, least in ((8, 0.8), (128, 0.75)):
        within = [row for row in timed if row["ranks"] <= most]
        predicted = [published()[row["name"]]["seconds"] for row in within]
        assert kendalltau(predicted, [row["seconds"] for row in within]).statistic >= least, most
    assert len(timed) >= 11


def test_every_published_row_is_predicted():
    assert set(published()) == {row["name"] for row in rows()}


def test_no_run_that_ended_for_lack_of_memory_is_said_to_fit():
    ended = [row for row in rows() if row["gib"] is None and row["name"] in published()]
    assert ended
    for row in ended:
        held = published()[row["name"]]["peak"] + MACHINES["h100"].context
        assert held > SHARE * row["device"] * GIB, row["name"]


@pytest.mark.slow
def test_a_published_run_is_predicted_as_the_record_says():
    row = rows()[0]
    request, found = planned(row)
    told = published()[row["name"]]
    assert (found.peak, found.peak + found.trace.unused) == (told["peak"], told["reserved"])
    assert sum(seconds(found, request, find(row["machine"])).values()) == pytest.approx(told["seconds"], abs=0.001)


def test_runs_on_an_accelerator_are_predicted():
    errors = {}
    for row in device_runs.rows():
        name = device_runs.name_of(row)
        errors[name] = abs(device_runs.record()[name] / GIB / row["allocated"] - 1)
    assert len(errors) >= 12
    assert sum(errors.values()) / len(errors) <= 0.01
    assert max(errors.values()) <= 0.02, max(errors, key=errors.get)


@pytest.mark.parametrize("number", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_on_an_accelerator_is_predicted_as_the_record_says(number):
    row = device_runs.rows()[number]
    assert device_runs.estimate(row).peak == device_runs.record()[device_runs.name_of(row)]
