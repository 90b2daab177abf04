"""``save_state(blocking=False)``: the loop waits for a copy, a thread writes, and what goes wrong is told later."""

from __future__ import annotations

import pytest
import torch

from drivetrain.checkpoint import inspect
from drivetrain.checkpoint.saver import HostBuffer, PlannedFile
from drivetrain.checkpoint.tensors import Source
from drivetrain.registry import get_registry
from drivetrain_testing import spawn


def sharding_or_not():
    """A backend of whole replicas and one of shards, of those installed that fill several processes of a CPU."""
    reports = [report for report in get_registry().reports() if report.ready]
    found = {}
    for report in reports:
        able = get_registry().info(report.name).capabilities
        if able.multi_process and able.async_save and (not able.devices or "cpu" in able.devices):
            found.setdefault(able.sharded_save, report.name)
    return sorted(found.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_before_anything_is_written(background, tmp_path, world_size):
    for early, unmoved, restored in spawn(background.beside_job, world_size, tmp_path):
        assert not early, "the folder appears whole, after the call"
        assert not unmoved
        assert restored, "what is saved is the state at the call"
    assert inspect(tmp_path / "one").problems == ()


def test_names_and_limit_are_those_of_saves_that_block(background, tmp_path):
    for seen, newest, restored, iteration in spawn(background.names_job, 2, tmp_path):
        assert seen == [
            ["checkpoint_0"],
            ["checkpoint_0", "checkpoint_1"],
            ["checkpoint_1", "checkpoint_2"],
            ["checkpoint_2", "checkpoint_3"],
        ]
        assert newest == "checkpoint_4", "load_state waits for the save that runs"
        assert restored
        assert iteration == 5


@pytest.mark.parametrize("surfaces", ["wait_for_checkpoint", "save_state", "load_state", "end_training"])
def test_a_failure_is_told_at_the_next_call_on_every_rank_and_the_last_good_one_stays(background, tmp_path, surfaces):
    for text, left, loaded, again in spawn(background.failing_job, 2, tmp_path, surfaces):
        assert "checkpoint_1 in the background failed: rank 1 of 2: could not write its part" in text
        assert "File too large" in text
        assert "save again" in text
        assert left == ["checkpoint_0"]
        assert loaded
        assert again, "told once; the next save works"


def test_ranks_that_write_at_different_speeds_do_not_block_the_training(background, tmp_path):
    assert spawn(background.uneven_job, 2, tmp_path) == [["checkpoint_0", "checkpoint_1", "checkpoint_2"]] * 2


def test_a_script_that_ends_with_a_save_ends_after_it(background, tmp_path):
    assert spawn(background.ends_without_a_word_job, 2, tmp_path) == [(True, [])] * 2


def test_observers_hear_of_it_when_it_is_complete_and_on_the_main_thread(background, tmp_path):
    assert spawn(background.observed_job, 1, tmp_path) == [([], [("one", True)])]


@pytest.mark.parametrize("backend", sharding_or_not())
def test_what_was_planned_holds_while_the_state_is_laid_out_alike(background, tmp_path, backend):
    for found, rows in spawn(background.planning_job, 2, tmp_path, backend):
        assert [planned for planned, _, _ in found] == [1, 1, 0, 0, 1, 0, 1, 0], "anew where something is new, only"
        failures = [error for _, error, _ in found if error]
        assert len(failures) == 1
        assert "rank 1 of 2: could not collect the state: RuntimeError: no state today" in failures[0], "at the call"
        assert [loaded for _, error, loaded in found if not error] == [True] * 7
        assert rows == [0.0, 1.0, 2.0], "the main process's state counts"


def planned(*tensors):
    return [PlannedFile("file", tuple(Source.of(f"t{index}", tensor) for index, tensor in enumerate(tensors)))]


def test_the_buffer_copies_every_kind_of_tensor_and_is_used_again():
    buffer = HostBuffer("cpu")
    tensors = [
        torch.arange(7, dtype=torch.int8),
        torch.randn(3, 5).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ]
    files = planned(*tensors)
    buffer.copy(files)
    copies = [source.produce() for source in files[0].sources]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(copies, before, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    place = copies[0].data_ptr()
    again = planned(*before)
    buffer.copy(again)
    assert again[0].sources[0].produce().data_ptr() == place
    buffer.release()
