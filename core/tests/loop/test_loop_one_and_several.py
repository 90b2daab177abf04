"""The sentences of docs/explanation/one-and-several.md, on one process and on three."""

from __future__ import annotations

from itertools import chain

import one_and_several_jobs as jobs
import pytest
import torch
from torch.nn import functional as F

from drivetrain_testing import spawn

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def test_a_mean_over_processes_is_no_mean_over_rows():
    x, y = (each[9:] for each in jobs.rows(16))
    truth = F.cross_entropy(jobs.model()(x), y).item()  # of the last of two batches, which has 7 rows
    for by_mean, counted, gathered in spawn(jobs.losses_of_a_short_batch, 3):
        assert abs(by_mean - truth) > 1e-3
        assert counted == pytest.approx(truth, rel=1e-5)
        assert gathered == pytest.approx(truth, rel=1e-5)


def test_a_repeated_row_is_counted_by_reduce_and_not_by_gather_for_metrics():
    assert spawn(jobs.counts_of_a_single_row, 3) == [(3.0, 1)] * 3
    assert spawn(jobs.counts_of_a_single_row, 1) == [(1.0, 1)]


def test_the_gradient_of_an_input_is_that_of_this_processs_mean_times_its_weight():
    x = jobs.rows(6)[0].requires_grad_()
    jobs.model()(x).pow(2).mean().backward()
    for steps in (1, 2):
        for left, asked in spawn(jobs.gradients_of_an_input, 3, 6, steps):
            torch.testing.assert_close(left, x.grad * 3 / steps, **CLOSE)
            # Free of the number of rows, which are six here and two on each process there.
            torch.testing.assert_close(asked * 2, x.grad * 6, **CLOSE)


def test_what_flows_back_is_of_this_processs_mean_and_is_clamped_alike_by_a_limit_times_the_processes():
    (truth,) = spawn(jobs.weights_after_a_clamped_step, 1, 0.03, times_processes=True)
    for found in spawn(jobs.weights_after_a_clamped_step, 3, 0.03, times_processes=True):
        torch.testing.assert_close(found, truth, **CLOSE)
    for found in spawn(jobs.weights_after_a_clamped_step, 3, 0.03, times_processes=False):
        assert (found - truth).abs().max() > 1e-3


HOOKS = {
    "output": "(register_hook of an output)",
    "retained": "(retain_grad of an output)",
    "layer": "(a backward hook of 1)",
    "layer, before": "(a backward hook of 1)",
}


@pytest.mark.parametrize("form", HOOKS)
def test_hooks_on_what_flows_back_are_said_once(form):
    (line,), *others = spawn(jobs.said_of_hooks, 2, form)
    assert HOOKS[form] in line
    assert "2 times as large" in line
    assert not any(others)


@pytest.mark.parametrize("form", ["parameter", "none"])
def test_other_hooks_are_left_alone(form):
    assert spawn(jobs.said_of_hooks, 2, form) == [[], []]
    assert spawn(jobs.said_of_hooks, 1, "output") == [[]]


@pytest.mark.parametrize("form", ["masked", "root"])
def test_what_is_no_mean_over_rows_is_averaged_and_the_form_beside_it_is_right(form):
    (truth,) = spawn(jobs.weights_after_a_step_of, 1, form)
    for found in spawn(jobs.weights_after_a_step_of, 3, f"{form}-right"):
        torch.testing.assert_close(found, truth, **CLOSE)
    for found in spawn(jobs.weights_after_a_step_of, 3, form):
        assert (found - truth).abs().max() > 1e-4


def test_class_weights_divide_by_the_labels_of_a_process_unless_items_are_given():
    (truth,) = spawn(jobs.weights_after_a_weighted_step, 1, "mean")
    for form in ("sum", "count_items"):
        for found in spawn(jobs.weights_after_a_weighted_step, 3, form):
            torch.testing.assert_close(found, truth, **CLOSE)
    for found in spawn(jobs.weights_after_a_weighted_step, 3, "mean"):
        assert (found - truth).abs().max() > 1e-3


def test_noise_of_the_script_is_alike_unless_the_seed_is_the_devices():
    alike, own = (spawn(jobs.drawn_noise, 3, device_specific=specific)[0] for specific in (False, True))
    assert torch.equal(alike[0], alike[1])
    assert torch.equal(alike[0], alike[2])
    assert not torch.equal(own[0], own[1])
    assert not torch.equal(own[1], own[2])


def test_split_batches_keeps_the_steps_of_an_epoch():
    assert spawn(jobs.steps_of_an_epoch, 1, split_batches=False) == [4]
    assert spawn(jobs.steps_of_an_epoch, 2, split_batches=False) == [2, 2]
    assert spawn(jobs.steps_of_an_epoch, 2, split_batches=True) == [4, 4]


def test_a_collate_function_sees_the_rows_of_a_process_unless_batches_are_dispatched():
    x = jobs.rows(12)[0][:6]
    for found in spawn(jobs.collated, 3, dispatch=True):
        torch.testing.assert_close(found, x - x.mean(0), **CLOSE)
    by_parts = torch.cat([part - part.mean(0) for part in x.split(2)])
    for found in spawn(jobs.collated, 3, dispatch=False):
        torch.testing.assert_close(found, by_parts, **CLOSE)


def test_a_memory_by_sample_has_what_its_process_saw_unless_it_is_gathered():
    for found in spawn(jobs.memory_by_sample, 3, gathered=True):
        assert found.tolist() == [number + 1.0 for number in range(12)]
    for found in spawn(jobs.memory_by_sample, 3, gathered=False):
        assert (found > 0).sum() == 4


def test_an_unseeded_shuffle_after_dropout_is_another_one_and_the_same_on_all_ranks():
    every = [float(sample) for sample in range(24)]
    ((one, drawn),) = spawn(jobs.orders_and_a_draw, 1, 0.5, seeds=False)
    found = spawn(jobs.orders_and_a_draw, 3, 0.5, seeds=False)
    assert all(each == found[0] for each in found)
    epochs, other = found[0]
    assert epochs[0] == one[0]
    assert epochs[1] != one[1]
    assert other != drawn
    for batches in epochs:
        assert sorted(chain(*batches)) == every
    assert spawn(jobs.orders_and_a_draw, 3, 0.5, seeds=False) == found


@pytest.mark.parametrize(("dropout", "seeds"), [(0.0, False), (0.5, True)], ids=["no dropout", "a generator"])
def test_a_shuffle_is_that_of_one_process_without_dropout_or_with_a_generator(dropout, seeds):
    ((one, drawn),) = spawn(jobs.orders_and_a_draw, 1, dropout, seeds=seeds)
    for epochs, other in spawn(jobs.orders_and_a_draw, 3, dropout, seeds=seeds):
        assert epochs == one
        assert (other == drawn) is (not dropout)
