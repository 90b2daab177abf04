"""The training traps that were reproduced with the best-known peer; each must not exist here."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.loop.precision import cast_output, policy_for
from drivetrain_testing import spawn

_spec = importlib.util.spec_from_file_location("loop_jobs", Path(__file__).with_name("loop_jobs.py"))
jobs = importlib.util.module_from_spec(_spec)
sys.modules["loop_jobs"] = jobs
_spec.loader.exec_module(jobs)

WORLDS = pytest.mark.parametrize("world", [1, 2])

# float32 sums in another order differ in the last bits; a wrong factor differs by a quarter.
TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}


def reference(windows: list[list[tuple[Tensor, Tensor]]], lr: float = 0.5, extra=None) -> list[Tensor]:
    """Plain torch, one process: one step for each window, its gradient the mean over its micro-batches."""
    model = jobs.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for window in windows:
        for x, y in window:
            loss = F.cross_entropy(model(x), y)
            if extra is not None:
                loss = loss + extra(model(x))
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return jobs.values(model)


def batches(rows: int, size: int) -> list[tuple[Tensor, Tensor]]:
    x, y = jobs.make_data(rows)
    return list(zip(x.split(size), y.split(size), strict=True))


def check(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    for result in results:
        torch.testing.assert_close(result, expected, **TOLERANCE)


@WORLDS
def test_several_micro_steps_on_the_last_batch_make_no_extra_steps(world):
    # 6 batches of 4 micro-steps with windows of 4: the peer makes 9 steps.
    results = spawn(jobs.micro_steps_per_batch, world, 6 * 16, 16, 4, 4)
    assert [steps for steps, _ in results] == [6] * world
    if world == 1:
        windows = [
            list(zip(x.chunk(4), y.chunk(4), strict=True)) for x, y in batches(6 * 16, 16)
        ]
        check([weights for _, weights in results], reference(windows))


@WORLDS
def test_a_partial_window_is_averaged_over_what_it_has(world):
    # 7 batches, windows of 3: the last window has one micro-batch.
    [(steps, _), *_] = results = spawn(jobs.micro_steps_per_batch, world, 28, 4, 1, 3)
    assert steps == 3
    parts = batches(28, 4)
    check([weights for _, weights in results], reference([parts[:3], parts[3:6], parts[6:]]))


@WORLDS
def test_zero_grad_at_the_top_of_a_micro_batch_keeps_the_window(world):
    parts = batches(20, 4)
    check(spawn(jobs.zero_grad_first, world, 2, 5), reference([parts[:2], parts[2:4], parts[4:]]))


@WORLDS
def test_windows_of_the_scripts_own_making(world):
    parts = batches(16, 4)
    check(spawn(jobs.own_windows, world, 4, 2), reference([parts[:2], parts[2:]]))


@WORLDS
def test_items_of_a_window_of_the_scripts_own_making(world):
    # Windows of 2 batches of 4 with labels 0 left out: each is one big batch.
    x, y = jobs.make_data(16)
    labels = torch.where(y == 0, -100, y)
    check(spawn(jobs.own_windows_of_items, world, 4, 2), reference([[(x[:8], labels[:8])], [(x[8:], labels[8:])]]))


@WORLDS
def test_two_losses_on_one_micro_batch_are_one_micro_batch(world):
    parts = batches(20, 4)
    windows = [parts[:2], parts[2:4], parts[4:]]
    check(
        spawn(jobs.two_losses_on_a_micro_batch, world, 5, 2),
        reference(windows, extra=lambda out: 0.1 * out.pow(2).mean()),
    )


def test_each_set_of_models_has_a_window_of_its_own():
    [(first, second)] = spawn(jobs.two_players, 1, 2, 4)
    parts = batches(16, 4)
    one, two = jobs.make_model(0), nn.Linear(3, 2)
    nn.init.constant_(two.weight, 0.3)
    nn.init.constant_(two.bias, 0.0)
    opt_one, opt_two = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two))
    for index, (x, y) in enumerate(parts):
        (F.cross_entropy(two(one(x).detach()), (y > 0).long()) / 2).backward()
        if index % 2:
            opt_two.step()
            two.zero_grad()
        (F.cross_entropy(two(one(x)), (y > 1).long()) / 2).backward()
        if index % 2:
            opt_one.step()
            one.zero_grad()
            two.zero_grad()
    torch.testing.assert_close(first, jobs.values(one), **TOLERANCE)
    torch.testing.assert_close(second, jobs.values(two), **TOLERANCE)


@WORLDS
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_non_finite_norm_skips_the_step_on_every_rank(world, precision):
    for before, after, moved, skipped, norm in spawn(jobs.non_finite, world, precision):
        assert skipped
        assert not math.isfinite(norm)
        assert moved == 0
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@WORLDS
def test_two_accelerators_with_different_settings_coexist(world):
    for facts in spawn(jobs.many_settings, world):
        assert facts == {
            "steps": (2, 3),
            "precision": ("no", "bf16"),
            "sync": (False, True),
            "outputs": (torch.float32, torch.float32),
            "world": (world, world),
            "alive": float(world),
        }


def test_runs_one_after_the_other_check_a_step_once():
    assert spawn(jobs.checks_of_steps_after, 1, 3) == [1]


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    labels: torch.Tensor
    name: str = "net"


def test_outputs_in_a_dataclass_are_cast_as_those_in_a_dict():
    policy = policy_for("bf16")
    half = torch.ones(2, dtype=torch.bfloat16)
    given = Output(half, [half, half], torch.ones(2, dtype=torch.int64))
    for cast in (cast_output(given, policy), Output(**cast_output(vars(given), policy))):
        assert (cast.logits.dtype, cast.hidden[1].dtype) == (torch.float32, torch.float32)
        assert (cast.labels.dtype, cast.name) == (torch.int64, "net")
    assert given.logits is half
