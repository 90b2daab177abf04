"""Prepared loaders of map-style datasets: what each rank sees, in any world."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
)

from drivetrain.data.loader import already_sharded, prepare_data_loader
from drivetrain.errors import UsageError

# Two or three workers are more than a small machine has processors; torch remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 22


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_sample_once_in_the_same_order_in_every_world(ranks, world, run, numbers):
    assert run(ranks(lambda: DataLoader(numbers(), batch_size=2), world)) == list(range(N))

    def seeded():
        return DataLoader(numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))

    alone = run(ranks(seeded))
    assert sorted(alone) == list(range(N))
    assert run(ranks(seeded, world)) == alone


def test_one_process_sees_what_torch_shows(context, numbers):
    for kwargs in ({}, {"drop_last": True}, {"batch_size": 5}, {"batch_size": 4, "collate_fn": sum}):
        made = DataLoader(numbers(), **kwargs)
        from_torch = [batch if isinstance(batch, int) else batch.tolist() for batch in made]
        prepared = prepare_data_loader(made, context())
        assert [batch if isinstance(batch, int) else batch.tolist() for batch in prepared] == from_torch
        assert len(prepared) == len(made) == len(from_torch)


@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}, {"data_seed": 4}])
def test_epochs_are_shuffled_differently_without_set_epoch(ranks, run, shuffled, config):
    loaders = ranks(shuffled(), 2, **config)
    epochs = [run(loaders) for _ in range(3)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert [loader.epoch for loader in loaders] == [3, 3]
    loaders[0].set_epoch(1)
    loaders[1].set_epoch(1)
    # An order that is drawn is the next one in any epoch.
    assert (run(loaders) == epochs[1]) is bool(config)
    assert [loader.epoch for loader in loaders] == [2, 2]


def test_loaders_of_one_run_shuffle_independently(context, shuffled):
    shared = context()
    one, two = (prepare_data_loader(shuffled()(), shared) for _ in range(2))
    assert torch.cat(list(one)).tolist() != torch.cat(list(two)).tolist()


def test_the_users_generator_and_data_seed_decide(ranks, run, shuffled, numbers):
    def seeded(seed):
        return run(ranks(lambda: DataLoader(numbers(), shuffle=True, generator=torch.Generator().manual_seed(seed))))

    assert seeded(1) == seeded(1) != seeded(2)
    assert run(ranks(shuffled(), data_seed=1, seed=3)) == run(ranks(shuffled(), data_seed=1, seed=4))
    assert run(ranks(shuffled(), data_seed=1)) != run(ranks(shuffled(), data_seed=2))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_batch_sampler_of_torch_is_cut_by_samples(ranks, world, run, numbers):
    def build():
        return DataLoader(numbers(), batch_sampler=BatchSampler(range(N), 3, drop_last=False))

    loaders = ranks(build, world)
    assert run(loaders) == list(range(N))
    assert loaders[0].total_batch_size == 3 * world


@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_of_a_custom_batch_sampler_go_round(ranks, world, run, numbers, buckets):
    sizes = [3, 1, 2, 5, 4, 1]

    def build():
        return DataLoader(numbers(), batch_sampler=buckets(sizes))

    loaders = ranks(build, world)
    assert [len(loader) for loader in loaders] == [-(-len(sizes) // world)] * world
    assert run(loaders) == list(range(sum(sizes)))
    uneven = ranks(build, world, even_batches=False)
    assert sum(len(loader) for loader in uneven) == sum(1 for loader in uneven for _ in loader) == len(sizes)


def test_split_batches_cuts_the_scripts_batch(ranks, numbers, buckets):
    loaders = ranks(lambda: DataLoader(numbers(), batch_size=4), 2, split_batches=True)
    assert [batch.tolist() for batch in loaders[1]][:2] == [[2, 3], [6, 7]]
    assert loaders[0].total_batch_size == 4
    custom = ranks(lambda: DataLoader(numbers(), batch_sampler=buckets([3, 4, 2])), 2, split_batches=True)
    assert [batch.tolist() for batch in custom[0]] == [[0, 1], [3, 4], [7]]
    assert [batch.tolist() for batch in custom[1]] == [[2], [5, 6], [8]]
    with pytest.raises(UsageError, match="split_batches cannot cut a batch of 3 into 2 equal parts"):
        ranks(lambda: DataLoader(numbers(), batch_size=3), 2, split_batches=True)
    with pytest.raises(UsageError, match="batch_size=None"):
        ranks(lambda: DataLoader(numbers(), batch_size=None), 2, split_batches=True)


def test_without_collation_items_go_round(ranks, run):
    def build():
        return DataLoader(torch.arange(10), batch_size=None, sampler=BatchSampler(range(10), 3, drop_last=False))

    loaders = ranks(build, 2)
    assert [batch.tolist() for batch in loaders[0]] == [[0, 1, 2], [6, 7, 8]]
    assert [batch.tolist() for batch in loaders[1]] == [[3, 4, 5], [9]]
    assert run(loaders) == list(range(10))


@pytest.mark.parametrize(
    ("size", "batch_size", "expected"),
    [(3, 1, ([1, 1], [1, 1])), (7, 2, ([2, 2], [2, 1])), (10, 4, ([4, 1], [4, 1]))],
)
def test_even_batches_by_rank(ranks, size, batch_size, expected, numbers):
    loaders = ranks(lambda: DataLoader(numbers(size), batch_size=batch_size), 2)
    assert tuple([len(batch) for batch in loader] for loader in loaders) == expected


@pytest.mark.parametrize(
    ("size", "batch_size", "expected"),
    [(3, 1, ([1, 1], [1])), (7, 2, ([2, 2], [2, 1])), (10, 4, ([4, 1], [4, 1]))],
)
def test_uneven_batches_by_rank(ranks, size, batch_size, expected, numbers):
    loaders = ranks(lambda: DataLoader(numbers(size), batch_size=batch_size), 2, even_batches=False)
    assert tuple([len(batch) for batch in loader] for loader in loaders) == expected
    assert [len(loader) for loader in loaders] == [len(each) for each in expected]


def test_a_dataset_smaller_than_the_world(ranks, run, numbers):
    loaders = ranks(lambda: DataLoader(numbers(2), batch_size=4), 4)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0]], [[1]], [[0]], [[1]]]
    assert run(ranks(lambda: DataLoader(numbers(2), batch_size=4), 4)) == [0, 1]
    assert run(ranks(lambda: DataLoader(numbers(0), batch_size=4), 4)) == []


def test_a_sharded_dataset_is_not_cut_again(ranks, numbers):
    loaders = ranks(lambda: DataLoader(already_sharded(numbers(5)), batch_size=2), 2)
    for loader in loaders:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
        assert loader.total_batch_size == 2
    state = loaders[0].state_dict()
    (alone,) = ranks(lambda: DataLoader(numbers(5), batch_size=2))
    with pytest.raises(UsageError, match="a loader marked as already sharded over 2 ranks"):
        alone.load_state_dict(state)
    with pytest.raises(UsageError, match="cannot be marked"):
        already_sharded(range(4))


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_fetch_what_the_plan_says(ranks, persistent, run, shuffled, numbers):
    def build():
        kwargs = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3}
        return DataLoader(numbers(), batch_size=2, shuffle=True, multiprocessing_context="fork", **kwargs)

    expected = ranks(shuffled(), 2, use_seedable_sampler=True)
    loaders = ranks(build, 2, use_seedable_sampler=True)
    assert run(loaders) == run(expected)
    first = run(loaders, 2)
    assert first == run(expected, 2)
    # Prefetched batches are not consumed ones.
    assert loaders[0].state_dict()["consumed"] == 8
    assert run(loaders) == run(expected)
    assert loaders[0].num_workers == 2
    assert loaders[0].prefetch_factor == 3


def test_out_of_order_workers_are_refused(context, numbers):
    with pytest.raises(UsageError, match="in_order=False"):
        prepare_data_loader(DataLoader(numbers(), num_workers=1, in_order=False), context())
