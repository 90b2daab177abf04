"""The step of a lazy device: what is compiled, what is read, what is skipped, what is filled up, what is told."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in the environment of `make test-xla`")

import xla_jobs as jobs

from drivetrain_testing import RankFailedError, spawn

TOLERANCE = 2e-6
"""float32 losses of about 2.5, added by XLA in another order than by torch."""


@pytest.mark.parametrize("devices", [1, 4])
def test_nothing_is_compiled_after_the_first_steps(devices):
    mesh = {"dp_shard": 4} if devices == 4 else {}
    rows = jobs.GLOBAL_BATCH * jobs.STEPS
    found = spawn(jobs.counts, 1, mesh, {}, 3, rows, env={"CPU_NUM_DEVICES": str(devices)})[0]
    compiled = [count for count, _ in found]
    assert compiled[0] > 0, "nothing is counted"
    assert compiled[0] == compiled[1] == compiled[2]


def test_a_step_without_clipping_reads_nothing_from_the_device():
    rows = jobs.GLOBAL_BATCH * jobs.STEPS
    found = spawn(jobs.counts, 1, {}, {}, 2, rows, None)[0]
    assert [reads for _, reads in found] == [0, 0]


def test_a_step_with_clipping_reads_one_verdict_a_step_later():
    rows = jobs.GLOBAL_BATCH * jobs.STEPS
    found = spawn(jobs.counts, 1, {}, {}, 2, rows)[0]
    assert [reads for _, reads in found] == [jobs.STEPS - 1, 2 * jobs.STEPS - 1]


def test_a_skipped_step_is_undone_though_nobody_asks():
    found = spawn(jobs.late_verdicts, 1)[0]
    assert found.pop("rates") == pytest.approx([0.9, 0.9]), "one move for two steps, of which one was applied"
    assert found == {"unasked": True, "untouched": True, "counted": 1.0, "finite": True}


def test_the_first_step_may_be_skipped():
    assert spawn(jobs.first_step_skipped, 1)[0] == (True, 0, True)


def test_a_filled_batch_weighs_on_nothing():
    """The loss of a short last batch is that of its own rows, metrics hold each row once, no graph is made for it."""
    expected, seen, _ = spawn(jobs.ragged, 1, "single", {})[0]
    filled, gathered, later = spawn(jobs.ragged, 1, "xla", {"fill_last_batch": True})[0]
    assert filled == pytest.approx(expected, abs=TOLERANCE)
    assert gathered == seen
    assert later == 0


def test_a_short_batch_is_right_without_filling():
    expected, seen, _ = spawn(jobs.ragged, 1, "single", {})[0]
    found, gathered, _ = spawn(jobs.ragged, 1, "xla", {})[0]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert gathered == seen


def test_two_processes_with_a_short_batch():
    expected, seen, _ = spawn(jobs.ragged, 1, "single", {})[0]
    for filled, gathered, later in spawn(jobs.ragged, 2, "xla", {"fill_last_batch": True}):
        # The last global batch has 3 rows; one of the two processes repeats one, which weighs in the mean of means
        # as it does under every backend. All steps before are the single process's.
        assert filled[:2] == pytest.approx(expected[:2], abs=TOLERANCE)
        assert gathered == seen
        assert later == 0


def test_a_fused_optimizer_steps_as_another():
    """torch has no fused kernels for the device; what a script asks of an accelerator changes no number here."""
    expected, found = (spawn(jobs.fused, 1, kind)[0] for kind in ("single", "xla"))
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_parameters_stay_who_they_are():
    assert spawn(jobs.moved, 1)[0] == {"tied": True, "same": True, "devices": {"xla"}}


def test_the_devices_random_numbers_are_seeded_saved_and_restored():
    first, then, again = spawn(jobs.dropping, 1, 7)[0]
    assert spawn(jobs.dropping, 1, 7)[0][0] == first
    assert spawn(jobs.dropping, 1, 8)[0][0] != first
    assert then == again != first


def test_changing_shapes_are_told_once():
    told = [line for line in spawn(jobs.shapes, 1, [4, 4, 4, 4, 5, 6, 7, 8, 9, 10])[0] if "compiled" in line]
    assert len(told) == 1
    assert "input 0: [8, 4], [8, 5], [8, 6]" in told[0]


def test_shapes_that_stay_are_not_told():
    assert spawn(jobs.shapes, 1, [4] * 10)[0] == []


@pytest.mark.parametrize(("second", "number"), [([11, 12, 13], 1), ([4, 4, 4, 4, 11, 12, 13, 14], 2)])
def test_each_trial_has_a_warm_up_and_is_told_once(second, number):
    told = spawn(jobs.shapes, 1, [4, 4, 4, 4, 5, 6, 7, 8], second)[0]
    assert len([line for line in told if "compiled" in line]) == number


def test_compiled_graphs_are_kept(tmp_path):
    files, told = spawn(jobs.graph_cache, 1, str(tmp_path / "graphs"))[0]
    assert files > 0
    assert ["cannot read them again" in line for line in told] == [True]


def test_devices_as_threads_are_refused_with_what_to_do():
    with pytest.raises(RankFailedError, match="one process then drives all devices as a mesh"):
        spawn(jobs.in_threads, 1, env={"CPU_NUM_DEVICES": "2"})


def test_a_batch_that_comes_beside_a_running_graph_is_whole():
    """Between one and eleven of these 600 batches were read half made while the loader's thread used ``tensor.to``."""
    assert spawn(jobs.brought, 1, 100)[0] == 0
