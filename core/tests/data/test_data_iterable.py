"""Iterable datasets and loaders of other makes: shared out without loss, and resumed by what was read."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.data.loader import already_sharded, skip_first_batches
from drivetrain.errors import UsageError

# Two or three workers are more than a small machine has processors; torch remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 23


class Stream(IterableDataset):
    """Numbers in order; with workers each yields its own."""

    def __init__(self, size: int = N, sized: bool = False) -> None:
        self.size = size
        if sized:
            self.__class__ = SizedStream

    def __iter__(self):
        info = get_worker_info()
        yield from range(0 if info is None else info.id, self.size, 1 if info is None else info.num_workers)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Shuffled(Stream):
    """Shuffles by Python's global random state, and draws from torch's while it reads."""

    def __iter__(self):
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        for number in numbers:
            yield number + 1000 * int(torch.rand(()) > 2)


class Epochs(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        yield from (number + 100 * self.epoch for number in super().__iter__())


def build(kind=Stream, batch_size=2, **kwargs):
    if kwargs.get("num_workers"):
        kwargs["multiprocessing_context"] = "fork"
    return lambda: DataLoader(kind(), batch_size=batch_size, **kwargs)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.gate("1", "4")
def test_every_sample_once_and_in_order(ranks, world, run):
    loaders = ranks(build(), world)
    assert run(loaders) == list(range(N))
    assert run(loaders) == list(range(N))


def test_even_and_uneven_ends(ranks, run):
    # What is left at the end is shared without repeating a sample.
    assert [[len(batch) for batch in loader] for loader in ranks(build(), 4)] == [[2, 2, 2]] * 3 + [[2, 2, 1]]
    uneven = ranks(build(lambda: Stream(9)), 4, even_batches=False)
    assert [[batch.tolist() for batch in loader] for loader in uneven] == [[[0, 1], [8]], [[2, 3]], [[4, 5]], [[6, 7]]]
    dropped = ranks(build(lambda: Stream(9), drop_last=True), 4)
    assert run(dropped) == list(range(8))


def test_random_streams_agree_on_every_rank_and_differ_by_epoch(ranks, run):
    random.seed(1)
    alone = ranks(build(Shuffled))
    epochs = [run(alone), run(alone)]
    random.seed(2)
    torch.manual_seed(2)
    shared = ranks(build(Shuffled), 4)
    assert [run(shared), run(shared)] == epochs
    assert sorted(epochs[0]) == list(range(N))
    assert epochs[0] != epochs[1]
    state = random.getstate()
    run(ranks(build(Shuffled)))
    assert random.getstate() == state


def test_the_dataset_is_told_the_epoch(ranks, run):
    (loader,) = ranks(build(Epochs))
    assert run([loader]) == list(range(N))
    assert run([loader])[0] == 100
    loader.set_epoch(7)
    assert run([loader])[0] == 700


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_their_own_streams(ranks, persistent, run):
    loaders = ranks(build(Epochs, num_workers=3, persistent_workers=persistent), 2)
    first = run(loaders)
    assert sorted(first) == list(range(N))
    assert first[:8] == [0, 3, 6, 9, 1, 4, 7, 10]
    assert sorted(run(loaders)) == [100 + number for number in range(N)]


def test_a_worker_init_fn_sees_the_users_dataset(ranks, run):
    class Range(IterableDataset):
        start, stop = 0, 20

        def __iter__(self):
            yield from range(self.start, self.stop)

    def cut(worker: int) -> None:
        mine = get_worker_info().dataset
        mine.start, mine.stop = worker * 10, worker * 10 + 10

    assert sorted(run(ranks(build(Range, num_workers=2, worker_init_fn=cut), 2))) == list(range(20))


@pytest.mark.parametrize("saved_by", [1, 2, 4])
@pytest.mark.parametrize("resumed_by", [1, 2, 4])
@pytest.mark.gate("2-4", "4-1")
def test_resumed_anywhere_each_sample_is_shown_once(ranks, saved_by, resumed_by, run):
    reference = ranks(build(Shuffled))
    epochs = [run(reference), run(reference)]
    for steps in range(1, -(-N // (2 * saved_by)) + 1):
        saving = ranks(build(Shuffled), saved_by)
        shown = run(saving, steps)
        state = json.loads(json.dumps(saving[0].state_dict()))
        resumed = ranks(build(Shuffled, batch_size=3), resumed_by, seed=1)
        for loader in resumed:
            loader.load_state_dict(state)
        assert shown + run(resumed) == epochs[0]
        assert run(resumed) == epochs[1]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.gate("1", "3")
def test_workers_streams_are_resumed_in_turn(ranks, steps, run):
    kwargs = {"num_workers": 3}
    epoch = run(ranks(build(**kwargs), 2))
    saving = ranks(build(**kwargs), 2)
    shown = run(saving, steps)
    state = saving[1].state_dict()
    assert state == saving[0].state_dict()
    for world in (1, 2):
        resumed = ranks(build(batch_size=2 * 2 // world, **kwargs), world)
        for loader in resumed:
            loader.load_state_dict(state)
        assert shown + run(resumed) == epoch


def test_another_number_of_workers_cannot_take_over(ranks, run):
    saving = ranks(build(num_workers=3))
    run(saving, 1)
    (resumed,) = ranks(build(num_workers=2))
    with pytest.raises(UsageError, match=r"3 worker stream\(s\), this loader reads 2.*num_workers=3"):
        resumed.load_state_dict(saving[0].state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_first_batches(ranks, workers, run):
    kwargs = {"num_workers": workers}
    full = ranks(build(**kwargs), 2)
    epoch = run(full)
    loaders = ranks(build(**kwargs), 2)
    views = [skip_first_batches(loader, 2) for loader in loaders]
    begun = run(views, 1)
    assert begun == epoch[8:12]
    state = loaders[0].state_dict()
    resumed = ranks(build(**kwargs), 2)
    for loader in resumed:
        loader.load_state_dict(state)
    assert run(resumed) == epoch[12:]
    assert run(resumed) == epoch


def test_length_if_the_dataset_has_one(ranks):
    sized = ranks(build(lambda: Stream(sized=True)), 2)
    assert [len(loader) for loader in sized] == [6, 6]
    assert sized[0].remainder == 3
    (unsized,) = ranks(build())
    with pytest.raises(TypeError, match="no length"):
        len(unsized)
    assert unsized.remainder == -1


def test_a_dataset_that_yields_batches(ranks, run):
    class Batches(IterableDataset):
        def __iter__(self):
            yield from (torch.arange(start, start + 3) for start in range(0, 21, 3))

    loaders = ranks(build(Batches, batch_size=None), 2)
    assert [len(list(loader)) for loader in loaders] == [4, 4]
    shown = run(loaders, 2)
    (resumed,) = ranks(build(Batches, batch_size=None))
    resumed.load_state_dict(loaders[0].state_dict())
    assert shown + run([resumed]) == list(range(21))


def test_a_sharded_stream_is_not_cut_again(ranks):
    for loader in ranks(build(lambda: already_sharded(Stream(5))), 2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_what_split_dataset_by_node_returns_is_recognised(ranks):
    class Config:
        rank, world_size = 1, 2

    class FromHub(Stream):
        _distributed = Config()

    assert [len(list(loader)) for loader in ranks(build(lambda: FromHub(8)), 2)] == [4, 4]


def test_drop_last_and_finished(ranks):
    saving = ranks(build(drop_last=True), 4)
    for _ in zip(*saving, strict=True):
        state = saving[0].state_dict()
    (resumed,) = ranks(build(drop_last=True))
    resumed.load_state_dict(state)
    assert list(resumed) == []


class Stateful:
    """A loader that is not torch's and keeps its own state."""

    def __init__(self, batches: int = 7) -> None:
        self.batches, self.at, self.epoch = batches, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        while self.at < self.batches:
            self.at += 1
            yield torch.arange(2) + 2 * (self.at - 1) + 100 * self.epoch
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("saved_by", [1, 2, 4])
@pytest.mark.parametrize("resumed_by", [1, 2, 4])
@pytest.mark.gate("2-4", "4-1")
def test_a_stateful_loader_is_shared_out_and_resumed(ranks, saved_by, resumed_by, run):
    loaders = ranks(Stateful, saved_by)
    assert run(loaders) == list(range(14))
    assert [len(loader) for loader in loaders] == [-(-7 // saved_by)] * saved_by
    shown = run(loaders, 1)
    state = json.loads(json.dumps(loaders[0].state_dict()))
    resumed = ranks(Stateful, resumed_by)
    for loader in resumed:
        loader.load_state_dict(state)
    assert shown + run(resumed) == [100 + number for number in range(14)]
    assert run(resumed) == [200 + number for number in range(14)]


def test_a_stateful_loader_goes_forward_only(ranks, run):
    (loader,) = ranks(Stateful)
    run([loader], 3)
    (resumed,) = ranks(Stateful)
    resumed.load_state_dict(loader.state_dict())
    assert run([skip_first_batches(resumed, 3)]) == list(range(6, 14))
    (resumed,) = ranks(Stateful)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="restored"), pytest.raises(UsageError, match="cannot go back to batch 1"):
        run([skip_first_batches(resumed, 1)])


def test_a_stateful_loader_marked_as_sharded_is_left_alone(ranks):
    for loader in ranks(lambda: already_sharded(Stateful(3)), 2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
