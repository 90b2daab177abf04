"""Data that ranks hold apart is refused where it would be shared out twice, and right scripts are left alone."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from kept_log import Kept
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from drivetrain import Accelerator, already_sharded
from drivetrain.data.comparison import Content, OrderComparison
from drivetrain.errors import CollectiveMismatchError, UsageError
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain_testing import RankFailedError, spawn

SIZE = 24


def points(rank=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(SIZE, 4, generator=generator), torch.arange(SIZE) % 2)


class Files(Dataset):
    """Reads what its list of names says, which must not be read before the training."""

    def __init__(self, names, noise=None):
        self.names, self.noise, self.reads = names, noise, 0

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        self.reads += 1
        return int(self.names[index][1:])


class Ordered(Sampler):
    """An order of the script's own."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


class Batches(Ordered):
    """Whole batches of two."""

    def __len__(self):
        return len(self.order) // 2

    def __iter__(self):
        return iter([self.order[index : index + 2] for index in range(0, len(self.order), 2)])


class Distributed(DistributedSampler):
    """A subclass, which is iterated."""


class Stream(IterableDataset):
    """Yields pairs of a number and its index."""

    def __init__(self, begin, step, *, noise=False, plain=False):
        self.begin, self.step, self.noise, self.plain = begin, step, noise, plain

    def __iter__(self):
        for index in range(self.begin, SIZE, self.step):
            # Of the operating system's, which nobody can seed.
            value = torch.tensor(float(int.from_bytes(os.urandom(2), "big") if self.noise else index))
            yield value if self.plain else (value, index)


class Stateful:
    """A loader with a state of its own."""

    def __init__(self, begin, step):
        self.begin, self.step, self.at = begin, step, 0

    def __iter__(self):
        for index in range(self.begin, SIZE, self.step):
            self.at = index
            yield torch.tensor([index, index + 100])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def names(begin=0, step=1):
    return [f"f{index}" for index in range(begin, SIZE, step)]


def drawn_apart(rank):
    """A split of a generator that every rank has seeded in its own way."""
    return random_split(points(), [16, 8], torch.Generator().manual_seed(rank))[0]


APART = {
    "subset": lambda rank, world: DataLoader(Subset(points(), range(rank, SIZE, world)), 2),
    "subset_of_equal_sizes_drawn_apart": lambda rank, world: DataLoader(drawn_apart(rank), 2),
    "subset_inside": lambda rank, world: DataLoader(
        ConcatDataset([points(), Subset(Subset(points(), list(range(SIZE))), torch.arange(rank, SIZE, world))]), 2
    ),
    "tensors": lambda rank, world: DataLoader(TensorDataset(points()[rank::world][0]), 2),
    "token_ids": lambda rank, world: DataLoader(TensorDataset(torch.arange(SIZE)[rank::world]), 2),
    "list": lambda rank, world: DataLoader(list(range(rank, SIZE, world)), 2),
    "range": lambda rank, world: DataLoader(range(rank * 8, rank * 8 + 8), 2),
    "files": lambda rank, world: DataLoader(Files(names(rank, world)), 2),
    "files_in_a_wrapper": lambda rank, world: DataLoader(ConcatDataset([Files(names(rank, world))]), 2),
    "lengths": lambda rank, world: DataLoader(Numbers(20 + rank), 2),
    "random_sampler_of_a_part": lambda rank, world: DataLoader(
        points(), 2, sampler=SubsetRandomSampler(range(rank, SIZE, world))
    ),
    "own_distributed_sampler": lambda rank, world: DataLoader(points(), 2, sampler=Distributed(points(), world, rank)),
    "distributed_sampler_of_a_part": lambda rank, world: DataLoader(
        part := Subset(points(), range(rank, SIZE, world)), 2, sampler=DistributedSampler(part, world, rank)
    ),
}

SETTINGS = {
    "batch_size": lambda rank, world: DataLoader(points(), 2 + rank),
    "drop_last": lambda rank, world: DataLoader(points(), 2, drop_last=rank > 0),
    "class of the sampler": lambda rank, world: DataLoader(points(), 2, shuffle=rank > 0),
    "num_workers": lambda rank, world: DataLoader(Stream(0, 1), 2, num_workers=2 * rank),
}

ALIKE = {
    "whole": lambda rank, world: DataLoader(points(), 2, shuffle=True),
    "split_of_one_seed": lambda rank, world: DataLoader(drawn_apart(0), 2),
    "marked_part": lambda rank, world: already_sharded(DataLoader(Subset(points(), range(rank, SIZE, world)), 2)),
    "marked_part_of_another_size": lambda rank, world: already_sharded(DataLoader(range(6 + rank), 2 + rank)),
    "marked_set": lambda rank, world: DataLoader(already_sharded(Files(names(rank, world))), 2),
    "torchs_distributed_sampler": lambda rank, world: DataLoader(
        points(), 2, sampler=DistributedSampler(points(), world, rank, shuffle=False)
    ),
    "noise_beside_the_samples": lambda rank, world: DataLoader(Files(names(), torch.full((SIZE,), 0.5 + rank)), 2),
    "own_order": lambda rank, world: DataLoader(points(), 2, sampler=Ordered(list(range(SIZE))[::-1])),
    "own_batches": lambda rank, world: DataLoader(points(), batch_sampler=Batches(list(range(SIZE)))),
    "stream": lambda rank, world: DataLoader(Stream(0, 1), 2),
    "stream_with_noise": lambda rank, world: DataLoader(Stream(0, 1, noise=True), 2),
    "stream_in_workers": lambda rank, world: DataLoader(Stream(0, 1), 2, num_workers=2),
    "marked_stream": lambda rank, world: DataLoader(already_sharded(Stream(rank, world)), 2),
    "stateful": lambda rank, world: Stateful(0, 1),
    "marked_stateful": lambda rank, world: already_sharded(Stateful(rank, world)),
    "seeds_of_generators": lambda rank, world: DataLoader(
        points(), 2, shuffle=True, generator=torch.Generator().manual_seed(rank)
    ),
    "empty_on_one_rank": lambda rank, world: DataLoader(list(range(4 * (rank != 1))), 2),
}

FIRST_PASS = {
    "own_order": lambda rank, world: DataLoader(points(), 2, sampler=Ordered(list(range(rank, SIZE, world)))),
    "own_order_of_equal_sizes": lambda rank, world: DataLoader(
        points(), 2, sampler=Ordered(torch.randperm(SIZE, generator=torch.Generator().manual_seed(rank)).tolist())
    ),
    "own_batches": lambda rank, world: DataLoader(points(), batch_sampler=Batches(list(range(rank, SIZE, world)))),
    "stream": lambda rank, world: DataLoader(Stream(rank, world), 2),
    "stream_of_numbers": lambda rank, world: DataLoader(Stream(rank, world, plain=True), 2),
    "stream_in_workers": lambda rank, world: DataLoader(Stream(rank, world), 2, num_workers=2),
    "stream_of_batches": lambda rank, world: DataLoader(Stream(rank, world), None),
    "stateful": Stateful,
}


class Numbers(Dataset):
    """Of a length that only it knows."""

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        return index


def accelerator_of(folder, **settings):
    warnings.filterwarnings("ignore", "this DataLoader has a DistributedSampler")
    path = Path(folder, f"config-{os.environ['RANK']}.yaml")
    path.write_text(json.dumps({"distributed_type": "ddp", "use_cpu": True, "rank_monitor": {"interval_seconds": 0.1}}))
    return Accelerator(config=path, **settings)


def prepare_each(loaders, folder, **settings):
    """Prepare loader after loader, each with a model; what is said of each."""
    accelerator = accelerator_of(folder, **settings)
    said = {}
    for name, make in globals()[loaders].items():
        made, model = make(accelerator.process_index, accelerator.num_processes), nn.Linear(4, 2)
        state, number = torch.get_rng_state(), len(accelerator._dataloaders)
        try:
            prepared = accelerator.prepare(model, made)
        except UsageError as error:
            said[name] = str(error)
            assert type(model) is nn.Linear
            assert len(accelerator._dataloaders) == number
        else:
            said[name] = ""
            assert prepared[1].number == number
        assert torch.equal(torch.get_rng_state(), state), name
        assert getattr(getattr(made, "dataset", None), "reads", 0) == 0
    accelerator.end_training()
    return said


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.gate("3")
def test_parts_are_refused_in_prepare_before_anything_is_changed(world, tmp_path):
    for said in spawn(prepare_each, world, "APART", str(tmp_path)):
        assert said.keys() == APART.keys()
        for name, text in said.items():
            assert "ranks hold different samples in loader 0" in text, name
            assert "already_sharded" in text
            assert "rank 1: " in text


def test_settings_that_differ_are_named(tmp_path):
    for said in spawn(prepare_each, 2, "SETTINGS", str(tmp_path)):
        for name, text in said.items():
            assert "with different settings" in text, name
            assert f"rank 0: {name} " in text


def test_right_loaders_are_prepared(tmp_path):
    for said in spawn(prepare_each, 3, "ALIKE", str(tmp_path)):
        assert not any(said.values()), said
        assert said.keys() == ALIKE.keys()


def test_dispatched_loaders_are_those_of_the_main_process(tmp_path):
    dispatching = DataLoaderConfiguration(dispatch_batches=True)
    for said in spawn(prepare_each, 2, "APART", str(tmp_path), dataloader_config=dispatching):
        assert not any(said.values()), said


class Broken(Files):
    """Has no length on ranks whose files are not there."""

    def __len__(self):
        if not self.names:
            raise FileNotFoundError
        return len(self.names)


DISPATCHED_PARTS = {
    **{name: APART[name] for name in ("subset", "tensors", "list", "files", "own_distributed_sampler")},
    "stream_with_a_rank": lambda rank, world: DataLoader(Stream(rank, world), 2),
}
DISPATCHED_WHOLE = {
    **{name: ALIKE[name] for name in ("whole", "split_of_one_seed", "own_order", "stream")},
    "on_the_main_process_alone": lambda rank, world: DataLoader(list(range(SIZE * (rank == 0))), 2),
    "broken_elsewhere": lambda rank, world: DataLoader(Broken(names() * (rank == 0)), 2),
}


def dispatch_each(loaders, folder):
    """Read each through the main process; what rank 0 says of it."""
    kept = Kept()
    logging.getLogger("drivetrain").addHandler(kept)
    accelerator = accelerator_of(folder, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    said = {}
    for name, make in globals()[loaders].items():
        del kept.lines[:]
        loader = accelerator.prepare(make(accelerator.process_index, accelerator.num_processes))
        for _ in range(2):
            for _ in loader:  # list() would ask for a length
                pass
        said[name] = [line for line in kept.lines if "never read" in line]
    accelerator.end_training()
    return said


def test_a_part_that_the_main_process_reads_for_all_is_named_once(tmp_path):
    said, others = spawn(dispatch_each, 2, "DISPATCHED_PARTS", str(tmp_path))
    assert {name: len(lines) for name, lines in said.items()} == dict.fromkeys(DISPATCHED_PARTS, 1)
    assert "number of the rank (Stream.begin)" in said["stream_with_a_rank"][0]
    assert "differs by rank (Subset.indices)" in said["subset"][0]
    assert not any(others.values())


def test_data_of_the_main_process_alone_is_read_without_a_word(tmp_path):
    for said in spawn(dispatch_each, 2, "DISPATCHED_WHOLE", str(tmp_path)):
        assert said.keys() == DISPATCHED_WHOLE.keys()
        assert not any(said.values()), said


def prepare_on_one(folder):
    """Mark a loader on one rank alone, then prepare one more on it."""
    accelerator = accelerator_of(folder)
    plain, marked = DataLoader(range(4)), already_sharded(DataLoader(range(4)))
    first, said = accelerator.process_index == 0, []
    for loaders in ([marked if first else plain], [plain, marked] if first else [plain]):
        with pytest.raises(UsageError) as caught:
            accelerator.prepare(*loaders)
        said.append(str(caught.value))
    return said


def test_marks_and_loaders_of_one_rank_are_refused(tmp_path):
    for mark, number in spawn(prepare_on_one, 2, str(tmp_path)):
        assert "marked as already sharded on ranks 0 alone" in mark
        assert "different numbers of loaders: 2 on rank 0, 1 on rank 1" in number


def read(loaders, name, folder):
    """Read a loader, and end."""
    accelerator = accelerator_of(folder)
    loader = accelerator.prepare(globals()[loaders][name](accelerator.process_index, accelerator.num_processes))
    for _ in loader:
        accelerator.gather(torch.zeros(1))
    accelerator.end_training()


def read_and_go_on(loaders, name, folder):
    """Read a loader, and make calls that do not end until the ranks have been compared beside them."""
    accelerator = accelerator_of(folder)
    loader = accelerator.prepare(globals()[loaders][name](accelerator.process_index, accelerator.num_processes))
    list(loader)
    while True:
        time.sleep(0.05)
        accelerator.gather(torch.zeros(1))


@pytest.mark.parametrize(("name", "how"), [*((name, read) for name in FIRST_PASS), ("own_order", read_and_go_on)])
@pytest.mark.gate("own_order-*", "stream_in_workers-*", "stateful-*")
def test_a_part_is_found_in_the_first_pass(name, how, tmp_path):
    with pytest.raises(RankFailedError) as caught:
        spawn(how, 2, "FIRST_PASS", name, str(tmp_path))
    assert isinstance(caught.value.cause, CollectiveMismatchError), caught.value
    said = str(caught.value.cause)
    assert "ranks read different samples in loader 0" in said
    assert "already_sharded" in said
    assert said.index("rank 0: ") < said.index("rank 1: ")


class Late(Sampler):
    """Draws each index when it is asked for, from torch's global state."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return (int(torch.randint(SIZE, ())) for _ in range(SIZE))


def draw_between(kind, folder):
    """Rank 1 draws by itself behind the fifth of six batches, from the state that the sampler goes on with."""
    accelerator = accelerator_of(folder)
    generator = torch.Generator().manual_seed(3)
    if kind == "own":
        sampler = Late()
    else:
        sampler = RandomSampler(points(), replacement=True, num_samples=4 * SIZE, generator=generator)
    loader = accelerator.prepare(DataLoader(points(), batch_size=2, sampler=sampler))
    torch.manual_seed(1)
    for index, _ in enumerate(loader):
        if index == 4 and accelerator.process_index == 1:
            torch.rand(2, generator=None if kind == "own" else generator)
    accelerator.end_training()


@pytest.mark.parametrize("kind", ["own", "torch's"])
def test_a_rank_that_draws_by_itself_in_the_middle_of_a_pass_is_found(kind, tmp_path):
    with pytest.raises(RankFailedError) as caught:
        spawn(draw_between, 2, kind, str(tmp_path))
    assert isinstance(caught.value.cause, CollectiveMismatchError), caught.value
    said = str(caught.value.cause)
    assert "ranks read different samples in loader 0" in said
    assert "give the sampler a generator of its own" in said


def read_each(loaders, folder):
    """Read loader after loader for two epochs."""
    accelerator = accelerator_of(folder)
    for name, make in globals()[loaders].items():
        loader = accelerator.prepare(make(accelerator.process_index, accelerator.num_processes))
        if name != "empty_on_one_rank":
            for _ in range(2):
                list(loader)
            accelerator.gather(torch.zeros(1))
    accelerator.end_training()


def test_right_loaders_are_read(tmp_path):
    spawn(read_each, 2, "ALIKE", str(tmp_path))


def train(folder, how):
    """Train for two steps; what the log says of the first forward."""
    kept = Kept()
    logging.getLogger("drivetrain").addHandler(kept)
    accelerator = accelerator_of(folder)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(points(), 2)
    if how == "prepared":
        loader = accelerator.prepare(loader)
    if how == "by hand":
        loader = DataLoader(Subset(points(), range(accelerator.process_index, SIZE, accelerator.num_processes)), 2)
    if how == "zeros first":
        model(torch.zeros(2, 4)).sum().item()
    if how == "evaluated":
        model.eval()
    for (x, y), _ in zip(loader, range(2), strict=False):
        loss = nn.functional.cross_entropy(model(torch.zeros(2, 4) if how == "zeros" else x), y)
        if how != "evaluated":
            accelerator.backward(loss)
            optimizer.step()
    accelerator.end_training()
    return [line for line in kept.lines if "All ranks have given the same inputs" in line]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["unprepared", "zeros first"])
@pytest.mark.gate("unprepared-3", "zeros first-2")
def test_a_loader_that_was_not_prepared_is_named_once(how, world, tmp_path):
    said, *others = spawn(train, world, str(tmp_path), how)
    assert len(said) == 1
    assert "[2, 4]" in said[0]
    assert "test_data_comparison.py:" in said[0]
    assert "accelerator.prepare(loader)" in said[0]
    assert not any(others)


@pytest.mark.parametrize("how", ["prepared", "by hand", "zeros", "evaluated"])
def test_inputs_that_differ_or_say_nothing_are_not_named(how, tmp_path):
    assert spawn(train, 2, str(tmp_path), how) == [[], []]


def test_floats_are_told_from_what_names_a_sample():
    assert Content([1, 2], torch.ones(3)).of_samples == Content([1, 2], torch.zeros(3)).of_samples
    assert Content([1, 1], torch.ones(3)).of_samples != Content([1, 1], torch.zeros(3)).of_samples
    assert Content("a", "b").of_samples != Content("a", "c").of_samples
    assert Content(object()).digest is None
    assert Content(torch.ones(3, dtype=torch.bfloat16)).digest is not None
    assert Content(torch.ones(2, device="meta")).digest is None


@pytest.mark.parametrize("kind", [int, np.int64, lambda number: [number, number]])
def test_a_read_between_two_that_are_told_counts(kind):
    """The third read of one rank differs; the fourth, with which the digest is told, is the same again."""
    told = []
    for third in (2, 7):
        found = {}
        order = OrderComparison(lambda key, digest, *_, found=found: found.update({key: digest}), 0)
        for place, number in enumerate((0, 1, third, 3)):
            order.read(place, [kind(number)], ended=False)
        told.append(found)
    first, second = told
    assert [key for key in first if first[key] != second[key]] == ["order/0/4"]
