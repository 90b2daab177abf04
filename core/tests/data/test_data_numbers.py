"""What reads draw: other numbers on each data-parallel coordinate, repeatable and resumed exactly; torch's on one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.data.loader import prepare_data_loader
from drivetrain.distributed.rng import set_seed

KINDS = 5


@pytest.fixture(autouse=True)
def _seeded():
    set_seed(7)
    yield
    set_seed(7)


class Noisy(Dataset):
    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(5), torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        held = float(self.numpy.random()), float(torch.rand((), generator=self.torch))
        return [index, float(torch.rand(())), random.random(), float(np.random.rand()), *held]


def rows(batches) -> list[list[float]]:
    return [row.tolist() for batch in batches for row in torch.stack(batch, 1)]


def build(**kwargs):
    return lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, **kwargs)


WAYS = pytest.mark.parametrize(
    "kwargs",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["here", "workers", "persistent"],
)


@WAYS
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.gate("3-here", "3-workers")
def test_no_two_ranks_draw_a_number(kwargs, world, ranks):
    read = [rows(loader) + rows(loader) for loader in ranks(build(**kwargs), world)]
    for kind in range(1, 1 + KINDS):
        drawn = [row[kind] for mine in read for row in mine]
        assert len(set(drawn)) == len(drawn) == 48, kind


@WAYS
@pytest.mark.gate("here", "persistent")
def test_a_run_repeats_and_another_seed_differs(kwargs, ranks):
    def run(seed):
        set_seed(seed)
        return [rows(loader) + rows(loader) for loader in ranks(build(**kwargs), 2)]

    first = run(7)
    assert run(7) == first
    other = run(8)
    assert not {row[1] for mine in first for row in mine} & {row[1] for mine in other for row in mine}


@WAYS
@pytest.mark.gate("here", "workers")
def test_a_resumed_epoch_goes_on_in_its_numbers(kwargs, ranks):
    def made():
        return ranks(build(**kwargs), 2, use_seedable_sampler=True)

    whole = [rows(loader) + rows(loader) for loader in made()]
    resumed = []
    for loader, again in zip(made(), made(), strict=True):
        rows(loader)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state = loader.state_dict()
        batches.close()
        torch.manual_seed(99)
        again.load_state_dict(state)
        resumed.append(rows(again))
        torch.manual_seed(7)
    assert resumed == [mine[12 + 4 :] for mine in whole]


def test_the_scripts_generators_do_not_move(ranks):
    for loader in ranks(build(), 2):
        set_seed(7)
        before = random.getstate(), np.random.get_state()[1].tolist(), loader.dataset.numpy.bit_generator.state
        rows(loader)
        after = random.getstate(), np.random.get_state()[1].tolist(), loader.dataset.numpy.bit_generator.state
        assert after == before


@WAYS
@pytest.mark.gate("here", "persistent")
def test_one_process_draws_what_torch_draws(kwargs, context):
    class Plain(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            return [index, float(torch.rand(())), random.random(), float(np.random.rand())]

    set_seed(7)
    expected = rows(DataLoader(Plain(), batch_size=2, **kwargs))
    set_seed(7)
    assert rows(prepare_data_loader(DataLoader(Plain(), batch_size=2, **kwargs), context())) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_numbers_on_demand(workers, ranks):
    read = []
    for loader in ranks(build(num_workers=workers), 2):
        set_seed(7, device_specific=False)
        read.append([row[1:] for row in rows(loader)])
    assert read[0] == read[1]


def seed_worker(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


def seed_numpy(worker: int) -> None:
    np.random.seed(worker)


def look(worker: int) -> None:
    assert torch.utils.data.get_worker_info().seed == torch.initial_seed()
    assert isinstance(torch.utils.data.get_worker_info().dataset, Noisy)


def test_init_functions_see_seeds_of_the_rank(ranks):
    for function in (seed_worker, look):
        read = [rows(loader) for loader in ranks(build(num_workers=2, worker_init_fn=function), 2)]
        for kind in (1, 2, 3):
            drawn = [row[kind] for mine in read for row in mine]
            assert len(set(drawn)) == len(drawn), (function, kind)


def test_seeds_of_an_init_function_hold(ranks):
    read = [rows(loader) for loader in ranks(build(num_workers=2, worker_init_fn=seed_numpy), 2)]
    assert [row[3] for row in read[0]] == [row[3] for row in read[1]]
    assert read[0][0][3] == np.random.RandomState(0).rand()


def noisy_collate(batch):
    return torch.tensor(batch), torch.rand(len(batch)), np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(16)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [lambda: range(16), Stream], ids=["map", "iterable"])
def test_collate_functions_draw_their_own(workers, data, ranks):
    loaders = ranks(lambda: DataLoader(data(), batch_size=2, num_workers=workers, collate_fn=noisy_collate), 2)
    flat = [each for loader in loaders for _, drawn, number in loader for each in (*drawn.tolist(), number)]
    assert len(set(flat)) == len(flat)
