"""A prepared loader shows what the plain one would, draws what it would draw, and resumes where it stopped."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain import Accelerator
from drivetrain.data import drawing
from drivetrain.data.loader import prepare_data_loader, skip_first_batches
from drivetrain.distributed.rng import set_seed
from drivetrain.errors import DrivetrainError
from drivetrain_testing import spawn

# Two workers are more than a small machine has processors; torch remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N, EPOCHS = 37, 3
WEIGHTS = torch.arange(1.0, N + 1).tolist()


class Lazy(Sampler[int]):
    """Draws each index when it is asked for it, from a generator in turn."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for index in range(N):
            drawn = (random.random(), np.random.rand(), float(torch.rand(())))
            yield int(drawn[index % 3] * N)


class OwnNumpy(Sampler[int]):
    """Has a generator of numpy's, and one of Python's."""

    def __init__(self) -> None:
        self.rng, self.other = np.random.default_rng(3), random.Random(3)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        first = self.rng.permutation(N).tolist()
        self.other.shuffle(first)
        yield from first


class Batches(Sampler[list[int]]):
    """Batches of several sizes, all drawn when iter() is called."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(N).tolist()
        random.shuffle(order)
        cuts = [0, *sorted(torch.randperm(N - 1)[:7].add(1).tolist()), N]
        return iter([order[begin:end] for begin, end in pairwise(cuts)])


class LateBatches(Sampler[list[int]]):
    """Draws each batch when it is asked for."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(7):
            yield np.random.choice(N, 5, replace=False).tolist()


class Endless(Sampler[int]):
    """No length, no end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(N).tolist()


Make = Callable[[torch.Generator | None, int], DataLoader[int]]


def of(sampler: Callable[[torch.Generator | None], Any], *, both: bool = False, **kwargs: Any) -> Make:
    def make(generator: torch.Generator | None, workers: int) -> DataLoader[int]:
        more = {"generator": generator} if both else {}
        if workers:
            more |= {"num_workers": workers, "multiprocessing_context": "fork"}
        return DataLoader(range(N), sampler=sampler(generator), **{"batch_size": 6, **kwargs}, **more)

    return make


def shuffled(generator: torch.Generator | None, workers: int = 0, **kwargs: Any) -> DataLoader[int]:
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(range(N), batch_size=6, shuffle=True, generator=generator, **more, **kwargs)


def in_batches(sampler: Callable[[], Any]) -> Make:
    def make(_generator: torch.Generator | None, workers: int) -> DataLoader[int]:
        more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        return DataLoader(range(N), batch_sampler=sampler(), **more)

    return make


KINDS: dict[str, Make] = {
    "shuffled": shuffled,
    "sampled": of(lambda generator: RandomSampler(range(N), generator=generator)),
    "several turns": of(lambda generator: RandomSampler(range(N), num_samples=2 * N, generator=generator)),
    "in turns of a batch": of(lambda generator: RandomSampler(range(12), num_samples=24, generator=generator)),
    "replaced": of(lambda generator: RandomSampler(range(N), True, 70, generator), both=True),
    "weighted": of(lambda generator: WeightedRandomSampler(WEIGHTS, 30, generator=generator)),
    "of a part": of(lambda generator: SubsetRandomSampler(range(3, N, 2), generator), both=True),
    "one by one": of(lambda generator: SubsetRandomSampler(range(3, N, 2), generator), batch_size=None),
    "in order": of(lambda _: None),
    "lazy": of(lambda _: Lazy()),
    "own generators": of(lambda _: OwnNumpy()),
    "batches": in_batches(Batches),
    "late batches": in_batches(LateBatches),
}
DROPPING: dict[str, Make] = {
    "some are dropped": of(lambda generator: RandomSampler(range(N), True, 70, generator), drop_last=True),
    "of a lazy one": in_batches(lambda: BatchSampler(Lazy(), 5, drop_last=True)),
}
"""Counts what is dropped, which depends on the number of ranks."""
OWN = ("shuffled", "sampled", "several turns", "in turns of a batch", "replaced", "weighted", "of a part", "one by one")
"""Kinds that draw from the generator that they are given."""
BOTH = [*((name, False) for name in KINDS), *((name, True) for name in OWN)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_from(seed: int) -> torch.Generator:
    """After other draws, as for ``random_split``."""
    generator = seeded(seed)
    torch.randperm(5, generator=generator)
    return generator


def listed(batch: Any) -> list[int]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [batch]


def states(*generators: torch.Generator | None) -> list[Any]:
    held = [each.get_state().tolist() for each in generators if each is not None]
    numpy = np.random.get_state(legacy=False)
    torch_state = torch.get_rng_state().tolist()
    return [torch_state, numpy["state"]["key"].tolist(), numpy["state"]["pos"], random.getstate(), held]


def plainly(loader: Any, generator: torch.Generator | None, leave: int | None) -> list[Any]:
    """Return what a script sees that draws by itself: batches and numbers of three passes, and states after each."""
    seen: list[Any] = []
    for epoch in range(EPOCHS):
        for index, batch in enumerate(loader):
            seen.append((listed(batch), float(torch.rand(())), random.random(), float(np.random.rand())))
            if generator is not None and index % 2:
                seen.append(float(torch.rand((), generator=generator)))
            if index == leave:
                break
        seen.append((epoch, states(generator)))
    return seen


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("leave", [None, 1], ids=["whole", "left"])
@pytest.mark.parametrize("generator", [None, seeded, drawn_from], ids=["global", "seeded", "drawn"])
@pytest.mark.parametrize("name", [*KINDS, *DROPPING])
@pytest.mark.turns(3)
def test_one_process_draws_call_by_call_what_the_plain_loop_draws(
    context: Any, name: str, generator: Any, leave: int | None, workers: int
) -> None:
    if workers and (generator is drawn_from or name in ("sampled", "in order")):
        return  # Held by the cases without workers; each of these costs a second.
    make = {**KINDS, **DROPPING}[name]
    seen = []
    for prepare in (lambda loader: loader, lambda loader: prepare_data_loader(loader, context())):
        set_seed(7)
        own = None if generator is None else generator(3)
        seen.append(plainly(prepare(make(own, workers)), own, leave))
    plain, prepared = seen
    for step, (expected, shown) in enumerate(zip(plain, prepared, strict=True)):
        assert shown == expected, step


# ---- several ranks --------------------------------------------------------------------------------------------------


def real(loader: Any, batch: Any) -> list[int]:
    """The rows of a batch that count."""
    info = loader._context.active.current
    rows = info.rows.real[loader._share_rank]
    return listed(batch)[: rows if not info.rows.whole or rows else 0]


def one_rank(loader: Any, epochs: int = EPOCHS) -> list[list[list[int]]]:
    return [[real(loader, batch) for batch in loader] for _ in range(epochs)]


def merged(of_ranks: list[list[list[list[int]]]]) -> list[list[int]]:
    """The order of each epoch, from the batches of all ranks."""
    order = []
    for epochs in zip(*of_ranks, strict=True):
        steps = max(len(each) for each in epochs)
        held = [each[step] for step in range(steps) for each in epochs if step < len(each)]
        order.append([row for batch in held for row in batch])
    return order


@pytest.mark.parametrize("apart", [False, True], ids=["alike", "apart"])
@pytest.mark.parametrize(
    ("name", "generator", "world"),
    [*((*kind, 3) for kind in BOTH), *((name, False, world) for name in ("shuffled", "lazy") for world in (2, 4))],
)
def test_ranks_read_the_plain_order_of_rank_0(ranks: Any, name: str, generator: bool, world: int, apart: bool) -> None:
    def build(rank: int = 0) -> Any:
        return KINDS[name](seeded(3 + apart * rank) if generator else None, 0)

    set_seed(7)
    plain = build()
    expected = [[row for batch in plain for row in listed(batch)] for _ in range(EPOCHS)]
    numbers = iter(range(world))
    of_ranks, after = [], []
    for rank, loader in enumerate(ranks(lambda: build(next(numbers)), world)):
        set_seed(7 + apart * rank)
        of_ranks.append(one_rank(loader))
        after.append(states(loader.base_dataloader.generator))
    assert merged(of_ranks) == expected
    if not apart:
        assert all(each == after[0] for each in after)


# ---- resume ---------------------------------------------------------------------------------------------------------


def snapshot() -> list[Any]:
    return [drawing.state_of(each) for each in (torch.default_generator, np.random, random)]


def restore(saved: list[Any]) -> None:
    for generator, state in zip((torch.default_generator, np.random, random), saved, strict=True):
        drawing.set_state_of(generator, state)


@pytest.mark.parametrize(("saved_by", "resumed_by", "stop"), [(1, 2, 0), (2, 3, 1), (3, 1, -1), (1, 1, -1)])
@pytest.mark.parametrize(("name", "generator"), BOTH)
def test_a_run_is_resumed_in_the_plain_order_on_any_number_of_ranks(
    ranks: Any, name: str, generator: bool, saved_by: int, resumed_by: int, stop: int
) -> None:
    """Saved after batch ``stop`` of the second epoch. The generators of the other process were seeded otherwise."""

    def build(seed: int = 3) -> Any:
        return KINDS[name](seeded(seed) if generator else None, 0)

    set_seed(7)
    plain = build()
    expected = [[row for batch in plain for row in listed(batch)] for _ in range(EPOCHS)]
    shown, saved = [], []
    for loader in ranks(build, saved_by):
        set_seed(7)
        one_rank(loader, 1)
        length = len(loader)
        batches = []
        for index, batch in enumerate(loader):
            batches.append(real(loader, batch))
            if index == stop % length:
                saved.append((json.loads(json.dumps(loader.state_dict())), snapshot()))
                break
        shown.append([batches])
    assert all(each[0] == saved[0][0] for each in saved)
    rest = []
    for loader in ranks(lambda: build(99), resumed_by):
        set_seed(1)
        loader.load_state_dict(saved[0][0])
        restore(saved[0][1])
        rest.append(one_rank(loader, 2))
    first, later = merged(rest)
    assert merged(shown)[0] + first == expected[1]
    assert later == expected[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 5], ids=["early", "late"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.gate("*-early-0", "shuffled-late-2", "lazy-late-2", "own generators-late-2", "batches-late-2")
def test_a_script_that_draws_between_batches_is_resumed(context: Any, name: str, stop: int, workers: int) -> None:
    """From the generator of the loader too, so that a sampler that draws late finds it in other states."""

    def step(batch: Any, generator: Any) -> Any:
        return listed(batch), float(torch.rand(())), random.random(), float(torch.rand((), generator=generator))

    def build(seed: int) -> Any:
        generator = seeded(seed)
        return generator, prepare_data_loader(KINDS[name](generator, workers), context())

    set_seed(7)
    generator, loader = build(3)
    whole: list[Any] = []
    state = None
    for epoch in range(EPOCHS):
        for index, batch in enumerate(loader):
            whole.append(step(batch, generator))
            if epoch == 1 and index == min(stop, len(loader) - 1):
                state, globals_, held = json.loads(json.dumps(loader.state_dict())), snapshot(), len(whole)
                own = generator.get_state()
    assert state is not None
    set_seed(1)
    generator, loader = build(99)
    loader.load_state_dict(state)
    restore(globals_)
    if name not in OWN:
        generator.set_state(own)  # The loader does not draw from it, so it is the script's to save.
    rest = [step(batch, generator) for _ in range(2) for batch in loader]
    assert rest == whole[held:]


def test_a_view_that_skips_is_the_rest_of_the_epoch_that_was_left(context: Any) -> None:
    set_seed(7)
    order = [listed(batch) for batch in shuffled(None)]
    set_seed(7)
    loader = prepare_data_loader(shuffled(None), context())
    for index, _ in enumerate(loader):
        if index == 1:
            break
    assert [listed(batch) for batch in skip_first_batches(loader, 2)] == order[2:]
    # From a fresh loader it is that of the pass that it begins.
    set_seed(7)
    loader = prepare_data_loader(shuffled(None), context())
    assert [listed(batch) for batch in skip_first_batches(loader, 2)] == order[2:]


def test_states_of_older_formats_go_on_in_their_order(context: Any) -> None:
    """By the seed and the epoch in format 1, and in format 2 what torch draws from the state at ``prepare``."""
    old = prepare_data_loader(shuffled(seeded(3)), context()).state_dict()
    for key in ("order", "generators", "sampler_epochs"):
        del old[key]
    plain = shuffled(seeded(3))
    expected = {2: [[row for batch in plain for row in listed(batch)] for _ in range(EPOCHS)]}
    for form, generator in ((1, None), (2, 3)):
        held = []
        for seed in (4, 5):
            own = seeded(seed)
            loader = prepare_data_loader(shuffled(own), context())
            loader.load_state_dict({**old, "format": form, "generator": generator, "consumed": 12})
            one = [real(loader, batch) for batch in loader]
            assert loader.state_dict()["format"] == 2
            held.append([[row for batch in each for row in batch] for each in [one, *one_rank(loader, 2)]])
        assert held[0] == held[1]
        if form in expected:
            assert held[0] == [expected[2][0][12:], *expected[2][1:]]


def test_other_generators_are_said(context: Any) -> None:
    state = prepare_data_loader(shuffled(seeded(3)), context()).state_dict()
    with pytest.warns(UserWarning, match=r"states of 1 generator\(s\) .* this loader has others"):
        prepare_data_loader(shuffled(None), context()).load_state_dict(state)


def test_a_copy_and_a_seed_between_epochs(context: Any) -> None:
    def passes(loader: Any, generator: torch.Generator) -> list[Any]:
        shown = []
        for epoch in range(EPOCHS):
            generator.manual_seed(epoch)
            shown.append([listed(batch) for batch in loader])
        return shown

    generator, other = seeded(3), seeded(3)
    assert passes(prepare_data_loader(shuffled(generator), context()), generator) == passes(shuffled(other), other)
    loader = prepare_data_loader(shuffled(seeded(3)), context())
    list(loader)
    copied = copy.deepcopy(loader)
    assert [listed(batch) for batch in copied] == [listed(batch) for batch in loader]


def test_loaders_that_are_zipped_draw_in_turn(context: Any) -> None:
    def both(prepare: Any) -> list[Any]:
        set_seed(7)
        one, two = prepare(shuffled(None)), prepare(KINDS["weighted"](None, 0))
        return [[listed(first), listed(second)] for _ in range(2) for first, second in zip(one, two, strict=False)]

    assert both(lambda loader: prepare_data_loader(loader, context())) == both(lambda loader: loader)


# ---- between processes ----------------------------------------------------------------------------------------------


def orders() -> list[Any]:
    """Rank 1 draws by itself before the second pass, from torch's state, and numpy's was never alike."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    torch.manual_seed(7)
    np.random.seed(rank)
    loaders = [accelerator.prepare(make(None, 0)) for make in (shuffled, KINDS["batches"], KINDS["weighted"])]
    seen = []
    for epoch in range(2):
        if epoch and rank == 1:
            torch.rand(3)
        for loader in loaders:
            shown = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            seen.append(sorted(row for batch in shown for row in batch))
    accelerator.end_training()
    return seen


def test_processes_read_one_order_where_they_drew_apart() -> None:
    np.random.seed(0)
    torch.manual_seed(7)
    plain = [make(None, 0) for make in (shuffled, KINDS["batches"], KINDS["weighted"])]
    random.seed(1)
    expected = [sorted(row for batch in loader for row in listed(batch)) for _ in range(2) for loader in plain]
    results = spawn(orders, 3)
    assert results == [expected] * 3


def passes_ahead(alike: bool) -> str:
    """Rank 0 has made ten passes when rank 1 makes its first."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    set_seed(7 if alike else rank)
    loader = accelerator.prepare(shuffled(None))
    if rank == 0:
        first, *_ = [[listed(batch) for batch in loader] for _ in range(10)]
    accelerator.wait_for_everyone()
    words = "rank 0 is more than 8 passes over this loader ahead, and its random numbers differ from this rank's"
    if rank == 1 and alike:
        first = [listed(batch) for batch in loader]
    elif rank == 1:
        with pytest.raises(DrivetrainError, match=rf"{words}.*seed all ranks alike \(set_seed\)"):
            next(iter(loader))
        first = []
    accelerator.end_training()
    return str([row for batch in first for row in batch])


def test_a_rank_that_comes_many_passes_late_is_refused_unless_all_were_seeded_alike() -> None:
    spawn(passes_ahead, 2, False)
    one, two = (json.loads(each) for each in spawn(passes_ahead, 2, True))
    assert sorted({*one, *two}) == list(range(N))
