"""Exact resume and skipping: every sample once, whoever saved and whoever goes on."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
)

from drivetrain.data.loader import PreparedDataLoader, skip_first_batches
from drivetrain.errors import UsageError

N = 22


# ---- resume ---------------------------------------------------------------------------------------------------------

WORLDS = [1, 2, 4]


@pytest.mark.parametrize("saved_by", WORLDS)
@pytest.mark.parametrize("resumed_by", WORLDS)
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_resumed_anywhere_each_sample_is_shown_once(ranks, saved_by, resumed_by, kind, run, numbers, buckets):
    """The resume matrix of Accelerate's accelerate#2823, at every stopping point and without help from the script."""
    builds = {
        "shuffle": lambda: DataLoader(
            numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
        "sampler": lambda: DataLoader(
            numbers(), batch_size=3, sampler=SubsetRandomSampler(range(N), torch.Generator().manual_seed(3))
        ),
        "batch_sampler": lambda: DataLoader(numbers(), batch_sampler=buckets([3, 2, 4, 1, 5, 4, 3])),
    }
    build = builds[kind]
    reference = ranks(build)
    epochs = [run(reference) for _ in range(3)]
    for steps in range(len(ranks(build, saved_by)[0]) + 1):
        saving = ranks(build, saved_by)
        before = run(saving) if steps == 0 else []
        shown = run(saving, steps)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in saving]
        assert all(state == states[0] for state in states)
        torch.manual_seed(steps)
        resumed = ranks(build, resumed_by, seed=99)
        for loader in resumed:
            loader.load_state_dict(states[0])
        rest = run(resumed)
        if steps == 0:
            assert before == epochs[0]
            assert rest == epochs[1]
            assert run(resumed) == epochs[2]
        else:
            assert shown + rest == epochs[0]
            assert run(resumed) == epochs[1]
            assert run(resumed) == epochs[2]


def test_the_position_survives_set_epoch_of_its_own_epoch(ranks, run, shuffled):
    saving = ranks(shuffled(), 2)
    run(saving)
    shown = run(saving, 2)
    state = saving[0].state_dict()
    (resumed,) = ranks(shuffled())
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert sorted(shown + run([resumed])) == list(range(N))
    (elsewhere,) = ranks(shuffled())
    elsewhere.load_state_dict(state)
    elsewhere.set_epoch(4)
    assert sorted(run([elsewhere])) == list(range(N))
    assert elsewhere.epoch == 5


def test_saved_after_the_last_batch_the_rest_is_empty(ranks, run, shuffled):
    (loader,) = ranks(shuffled(), use_seedable_sampler=True)
    for _ in loader:
        state = loader.state_dict()
    assert state["finished"]
    (resumed,) = ranks(shuffled(), use_seedable_sampler=True)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert run([resumed]) == run([loader])


def test_dropped_samples_stay_dropped_in_a_smaller_world(ranks, numbers):
    def build():
        return DataLoader(numbers(), batch_size=3, drop_last=True)

    saving = ranks(build, 4)
    for _ in zip(*saving, strict=True):
        states = [loader.state_dict() for loader in saving]
    (resumed,) = ranks(build)
    resumed.load_state_dict(states[0])
    assert list(resumed) == []


def test_after_a_break_the_next_epoch_begins_at_its_start(ranks, run, shuffled):
    (loader,) = ranks(shuffled())
    reference = [run(ranks(shuffled())), None]
    for _ in loader:
        break
    assert loader.epoch == 0
    second = run([loader])
    assert sorted(second) == list(range(N))
    assert second != reference[0]
    assert loader.epoch == 2


def test_foreign_states_are_refused(ranks, shuffled, numbers, buckets):
    (loader,) = ranks(shuffled())
    (batches,) = ranks(lambda: DataLoader(numbers(), batch_sampler=buckets([1, 2])))
    with pytest.raises(UsageError, match="not the state of a prepared loader"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(UsageError, match="counts batches, this loader counts samples"):
        loader.load_state_dict(batches.state_dict())
    with pytest.raises(UsageError, match="has format 9"):
        loader.load_state_dict({**loader.state_dict(), "format": 9})


def test_a_dataset_of_another_length_is_remarked(ranks, shuffled, numbers):
    (loader,) = ranks(shuffled())
    (other,) = ranks(lambda: DataLoader(numbers(N + 1), shuffle=True))
    with pytest.warns(UserWarning, match="had 22 samples when its position was saved and has 23 now"):
        other.load_state_dict(loader.state_dict())


# ---- skips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_skipping_is_absolute_and_happens_once(ranks, world, run, shuffled):
    full = ranks(shuffled(), world, use_seedable_sampler=True)
    epochs = [run(full), run(full)]
    loaders = ranks(shuffled(), world, use_seedable_sampler=True)
    views = [skip_first_batches(loader, 3) for loader in loaders]
    assert all(isinstance(view, PreparedDataLoader) for view in views)
    assert [len(view) for view in views] == [len(loader) - 3 for loader in loaders]
    assert run(views) == epochs[0][3 * 2 * world :]
    assert run(loaders) == epochs[1]
    assert len(views[0]) == len(loaders[0])


def test_a_restored_position_is_not_skipped_twice(ranks, run, shuffled):
    saving = ranks(shuffled(), 2)
    shown = run(saving, 3)
    resumed = ranks(shuffled(), 2)
    for loader in resumed:
        loader.load_state_dict(saving[0].state_dict())
    views = [skip_first_batches(loader, 3) for loader in resumed]
    rest = run(views, 1)
    state = views[0].state_dict()
    assert state == resumed[0].state_dict()
    assert state["consumed"] == 16
    (alone,) = ranks(shuffled())
    alone.load_state_dict(state)
    assert sorted(shown + rest + run([alone])) == list(range(N))


def test_a_skip_that_contradicts_the_checkpoint_is_remarked(ranks, run, shuffled):
    saving = ranks(shuffled(), 2)
    run(saving, 3)
    (resumed,) = ranks(shuffled())
    resumed.load_state_dict(saving[0].state_dict())
    with pytest.warns(UserWarning, match=r"restored position is sample 12 .*skip_first_batches\(3\) begins at 6"):
        assert len(run([skip_first_batches(resumed, 3)])) == N - 6


def test_a_script_that_counts_batches_goes_on_in_the_next_epoch(ranks, run, shuffled):
    """Saved at an epoch's last batch, resumed as Accelerate's examples do: ``skip_first_batches(loader, 0)``."""
    (loader,) = ranks(shuffled(), use_seedable_sampler=True)
    for _ in loader:
        state = loader.state_dict()
    (resumed,) = ranks(shuffled(), use_seedable_sampler=True)
    resumed.load_state_dict(state)
    assert run([skip_first_batches(resumed, 0)]) == run([loader])
    resumed.load_state_dict(state)
    assert run([skip_first_batches(resumed, len(loader))]) == []
    assert resumed.epoch == 1


def test_skipping_on_a_plain_loader(numbers):
    for loader in (DataLoader(numbers(10), batch_size=3), DataLoader(numbers(10), batch_size=None)):
        whole = [batch if isinstance(batch, int) else batch.tolist() for batch in loader]
        view = skip_first_batches(loader, 2)
        assert len(view) == len(whole) - 2
        assert [batch if isinstance(batch, int) else batch.tolist() for batch in view] == whole[2:]
        assert len(list(view)) == len(whole)
        assert view.dataset is loader.dataset
    assert list(skip_first_batches([1, 2, 3], 1)) == [2, 3]
    with pytest.raises(UsageError, match=r"cannot skip -1 batches\. Give the number of batches to skip, from 0 on"):
        skip_first_batches(loader, -1)
    assert list(skip_first_batches(loader, 0)) == list(loader)
