"""Random numbers of forwards and reads: another stream for each coordinate, and the script's generators alike."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from drivetrain.distributed.rank_numbers import ForwardNumbers, Held, held_generators, numbers_coordinate, reading_held
from drivetrain.distributed.rng import set_seed


@pytest.fixture(autouse=True)
def _seeded():
    set_seed(7)
    yield
    set_seed(7)


def forward(coordinate: int, draws: int = 3) -> list[float]:
    with ForwardNumbers(coordinate, "cpu"):
        return torch.rand(draws).tolist()


def test_coordinates_draw_other_numbers_and_leave_one_state():
    seen, states = [], []
    for coordinate in range(4):
        set_seed(7)
        # A rank with more rows draws more.
        seen.append([forward(coordinate, 3 + coordinate)[:3] for _ in range(2)])
        states.append(torch.get_rng_state())
    assert len({str(step) for each in seen for step in each}) == 8
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_forward_that_draws_nothing_leaves_every_state():
    before = torch.get_rng_state(), random.getstate()
    with ForwardNumbers(1, "cpu"):
        torch.ones(3).sum()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_the_seed_that_the_script_set_counts():
    first = forward(1)
    assert forward(1) != first
    torch.manual_seed(7)
    assert forward(1) == first
    torch.manual_seed(8)
    assert forward(1) != first
    assert torch.initial_seed() == 8


def test_layers_are_chosen_alike():
    with ForwardNumbers(1, "cpu"):
        inside = random.random(), np.random.rand()
    set_seed(7)
    assert (random.random(), np.random.rand()) == inside


def test_an_error_in_a_forward_gives_the_state_back():
    set_seed(7)
    expected = (forward(0), torch.rand(2).tolist())[1]
    set_seed(7)
    with pytest.raises(RuntimeError, match="shape"), ForwardNumbers(3, "cpu"):
        torch.rand(5).reshape(2, 3).size()
    assert torch.rand(2).tolist() == expected


def test_equal_numbers_on_demand():
    set_seed(7, device_specific=False)
    assert [numbers_coordinate(rank) for rank in (0, 3)] == [0, 0]
    plain = torch.rand(3).tolist()
    for coordinate in range(2):
        set_seed(7, device_specific=False)
        assert forward(coordinate) == plain
    set_seed(7)
    assert numbers_coordinate(3) == 3


def test_recomputed_activations_draw_what_they_drew():
    drop = torch.nn.Dropout(0.5)
    x = torch.ones(64, requires_grad=True)
    with ForwardNumbers(1, "cpu"):
        y = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False)
    torch.rand(5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_vmap_of_a_forward():
    def call(x):
        with ForwardNumbers(1, "cpu"):
            return x * 2

    assert torch.func.vmap(call)(torch.ones(3)).tolist() == [2, 2, 2]

    def drawing(x):
        with ForwardNumbers(1, "cpu"):
            return x * torch.rand(())

    assert len(set(torch.func.vmap(drawing, randomness="different")(torch.ones(3)).tolist())) == 3


class Transform:
    def __init__(self) -> None:
        self.numpy, self.old = np.random.default_rng(0), np.random.RandomState(0)


class Inner(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.transforms = [Transform(), lambda sample: sample]
        self.samples = [torch.Generator() for _ in range(100)]

    def __len__(self) -> int:
        return 4


def test_generators_are_found_where_datasets_keep_them():
    inner = Inner()
    inner.more = {"a": torch.Generator(), "b": random.Random(1)}
    data = torch.utils.data.Subset(torch.utils.data.ConcatDataset([inner]), [0])
    found = held_generators(data)
    kinds = [np.random.Generator, np.random.RandomState, torch.Generator, random.Random]
    assert [type(each) for each in found] == kinds


RNG = np.random.default_rng(3)


def test_generators_of_functions_are_found():
    own, other = random.Random(0), torch.Generator()

    def transform(sample, generator=None):
        return sample + own.random() + RNG.random()

    class Data(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.transform = partial(transform, generator=other)

        def __getitem__(self, index):
            return self.transform(index) + RNG.random()

        def draw(self):
            return 0

    assert set(map(id, held_generators(Data()))) == {id(own), id(other), id(RNG)}
    assert held_generators(Data().draw)
    assert held_generators(np, torch.nn.Linear, None) == []


def of_each_kind() -> list:
    return [np.random.default_rng(0), np.random.RandomState(0), torch.Generator().manual_seed(0), random.Random(0)]


def draw(generators) -> list[float]:
    numpy, old, own, python = generators
    return [numpy.random(), old.rand(), torch.rand((), generator=own).item(), python.random()]


def test_held_generators_are_put_back():
    held = of_each_kind()
    expected = draw(of_each_kind())
    read = []
    for seed in (1, 2, 1):
        with reading_held(held, seed):
            read.append(draw(held))
    assert read[0] == read[2]
    assert not set(read[0]) & set(read[1])
    assert draw(held) == expected


def test_held_generators_of_a_worker_follow_their_own_seeds():
    class Data:
        def __init__(self, seed: int) -> None:
            self.rng = np.random.default_rng(seed)

    drawn = []
    for own in (1, 2, 1):
        data = Data(own)
        held = Held(data)
        held.seed(9)
        assert held.changed
        drawn.append(data.rng.random())
    assert drawn[0] == drawn[2] != drawn[1]
