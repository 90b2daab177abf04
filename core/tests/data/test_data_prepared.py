"""What a prepared loader says of itself, which batch is current, where batches are put."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.data.loader import prepare_data_loader
from drivetrain.errors import UsageError

N = 22


# ---- what it says of itself -----------------------------------------------------------------------------------------


def test_it_is_a_data_loader_and_shows_the_users_attributes(ranks, numbers):
    def collate(samples):
        return samples

    made = DataLoader(numbers(), batch_size=2, collate_fn=collate, drop_last=True)
    made.remark = "mine"
    (loader,) = ranks(lambda: made)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is made.dataset
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.remark) == (2, 0, True, "mine")
    assert loader.collate_fn is collate
    assert loader.batch_sampler is made.batch_sampler
    assert loader.sampler is made.sampler
    assert loader.multiprocessing_context is None
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_this_name


def test_preparing_twice_is_the_same_loader(ranks, context, shuffled):
    (loader,) = ranks(shuffled())
    assert prepare_data_loader(loader, context()) is loader
    with pytest.raises(UsageError, match="int is no data loader"):
        prepare_data_loader(3, context())


def test_sizes(ranks, numbers):
    loaders = ranks(lambda: DataLoader(numbers(), batch_size=4), 2)
    assert [len(loader) for loader in loaders] == [3, 3]
    assert loaders[0].total_batch_size == 8
    assert loaders[0].total_dataset_length == N
    assert loaders[0].remainder == 6
    (dropping,) = ranks(lambda: DataLoader(numbers(), batch_size=4, drop_last=True))
    assert dropping.remainder == -1


def test_end_of_dataloader_and_the_active_batch(ranks, numbers):
    (loader,) = ranks(lambda: DataLoader(numbers(5), batch_size=2))
    active = loader._context.active
    seen = [
        (loader.end_of_dataloader, active.is_last_batch(), active.batch_index(), active.current.serial) for _ in loader
    ]
    assert [each[:3] for each in seen] == [(False, False, 0), (False, False, 1), (True, True, 2)]
    assert len({each[3] for each in seen}) == 3
    assert loader.end_of_dataloader
    assert active.current is None
    assert not active.is_last_batch()
    assert active.batch_index() is None


def test_nested_loops_broken_loops_and_exceptions(ranks, context, numbers):
    shared = context()
    outer, inner = (prepare_data_loader(DataLoader(numbers(6), batch_size=2), shared) for _ in range(2))
    active = shared.active
    for _ in outer:
        serial = active.current.serial
        for index, _ in enumerate(inner):
            assert active.current.loader is inner
            if index == 1:
                break
        assert active.current.loader is outer
        assert active.current.serial == serial
        with pytest.raises(KeyError):
            fail(inner)
        assert [info.loader for info in active.in_one_loop()] == [outer]
        break
    assert active.current is None
    for one, two in zip(outer, inner, strict=True):
        assert torch.equal(one, two)
        assert active.current.loader is inner
    assert active.in_one_loop() == []


def test_the_innermost_loader_says_whether_its_batch_is_the_last(context):
    """A global flag of the outer loop's last batch would force a step at every inner one."""
    shared = context()
    outer, inner = (prepare_data_loader(DataLoader(range(4), batch_size=2), shared) for _ in range(2))
    seen = []
    for _ in outer:
        for _ in inner:
            seen.append(shared.active.is_last_batch())  # noqa: PERF401 - asked inside of both loops
        seen.append(shared.active.is_last_batch())
    assert seen == [False, True, False, False, True, True]


def fail(loader):
    for _ in loader:
        raise KeyError


def test_even_batches_can_be_overridden_for_a_while(ranks, numbers):
    from drivetrain.data.loader import even_batches_as

    loaders = ranks(lambda: DataLoader(numbers(3), batch_size=1), 2)
    with even_batches_as(loaders, False):
        assert [len(list(loader)) for loader in loaders] == [2, 1]
    assert [len(list(loader)) for loader in loaders] == [2, 2]
    with even_batches_as(loaders, None):
        assert [len(loader) for loader in loaders] == [2, 2]


class Pair(NamedTuple):
    x: Any
    y: Any


class Movable:
    def __init__(self) -> None:
        self.where = None

    def to(self, device):
        self.where = device
        return self


def test_batches_are_put_on_the_device_with_their_structure(context, numbers):
    def collate(samples):
        return {"pair": Pair(torch.tensor(samples), ["a"]), "thing": Movable(), "rest": (None, 3)}

    made = DataLoader(numbers(2), batch_size=2, collate_fn=collate)
    (batch,) = prepare_data_loader(made, context(), put_on_device=True)
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].x.tolist() == [0, 1]
    assert torch.device(batch["thing"].where) == torch.device("cpu")
    assert batch["rest"] == (None, 3)
    (batch,) = prepare_data_loader(made, context(), put_on_device=False)
    assert batch["thing"].where is None


def test_a_subclass_of_data_loader_keeps_its_ways(ranks, run, numbers):
    class Doubling(DataLoader):
        def __init__(self, dataset, factor):
            super().__init__(dataset, batch_size=2)
            self.factor = factor

        def __iter__(self):
            return (batch * self.factor for batch in super().__iter__())

    loaders = ranks(lambda: Doubling(numbers(6), 10), 2)
    assert run(loaders) == [0, 10, 20, 30, 40, 50]


def test_a_tensor_dataset_gives_tuples(ranks):
    loaders = ranks(lambda: DataLoader(TensorDataset(torch.arange(6), torch.arange(6) * 2), batch_size=3), 2)
    ((x, y),) = list(loaders[1])
    assert (x.tolist(), y.tolist()) == ([3, 4, 5], [6, 8, 10])


def test_the_users_loader_stays_usable(ranks, numbers):
    made = DataLoader(numbers(6), batch_size=2)
    (loader,) = ranks(lambda: made)
    list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [batch.tolist() for batch in made] == [[0, 1], [2, 3], [4, 5]]


class Counted(IterableDataset):
    def __iter__(self):
        yield from range(8)


@pytest.mark.parametrize("whole", [True, False], ids=["read", "left"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("data", [lambda: range(8), Counted], ids=["map", "iterable"])
def test_a_dropped_loader_needs_no_garbage_collector(data, world, whole, ranks):
    """Check that no circle of references holds it: torch waits 5 s for each persistent worker that one holds."""
    dropped = []
    gc.collect()
    gc.disable()
    try:
        for loader in ranks(lambda: DataLoader(data(), batch_size=2, num_workers=1, persistent_workers=True), world):
            passed = iter(loader)
            next(passed)
            for _ in passed if whole else ():
                pass
            dropped += [weakref.ref(loader), weakref.ref(loader._source)]
            del passed
        del loader
        assert [one() for one in dropped] == [None] * len(dropped)
    finally:
        gc.enable()
