"""With a generator of the user's, a prepared loader shows what the plain one would, and resumes where it stopped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from drivetrain import Accelerator
from drivetrain_testing import spawn

N, EPOCHS = 37, 3


def shuffled(generator: torch.Generator) -> DataLoader[int]:
    return DataLoader(range(N), batch_size=6, shuffle=True, generator=generator)


def in_workers(generator: torch.Generator) -> DataLoader[int]:
    return DataLoader(range(N), 6, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)


def sampled(generator: torch.Generator) -> DataLoader[int]:
    """The workers' seed is drawn elsewhere."""
    return DataLoader(range(N), 6, sampler=RandomSampler(range(N), generator=generator))


def several_turns(generator: torch.Generator) -> DataLoader[int]:
    return DataLoader(range(N), 6, sampler=RandomSampler(range(N), num_samples=2 * N, generator=generator))


def with_replacement(generator: torch.Generator) -> DataLoader[int]:
    sampler = RandomSampler(range(N), True, 70, generator)
    return DataLoader(range(N), 6, sampler=sampler, generator=generator, drop_last=True)


def weighted(generator: torch.Generator) -> DataLoader[int]:
    sampler = WeightedRandomSampler(torch.arange(1.0, N + 1).tolist(), 30, generator=generator)
    return DataLoader(range(N), 6, sampler=sampler)


def of_a_part(generator: torch.Generator) -> DataLoader[int]:
    return DataLoader(range(N), 6, sampler=SubsetRandomSampler(range(3, N, 2), generator), generator=generator)


MAKERS = [shuffled, in_workers, sampled, several_turns, with_replacement, weighted, of_a_part]


def drawn_from(seed: int) -> torch.Generator:
    """After other draws, as for ``random_split``."""
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(5, generator=generator)
    return generator


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def passes(loader: Any, epochs: int = EPOCHS) -> list[list[int]]:
    return [[int(one) for batch in loader for one in batch] for _ in range(epochs)]


@pytest.mark.parametrize("generator", [seeded, drawn_from])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.gate("*-seeded")
def test_epochs_of_the_plain_loader(make: Any, generator: Any) -> None:
    plain = passes(make(generator(3)))
    assert plain[0] != plain[1]
    assert passes(Accelerator(cpu=True).prepare(make(generator(3)))) == plain


def shares(make: Any) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    # Rank 0's is the one that counts.
    loader = accelerator.prepare(make(seeded(3 + accelerator.process_index)))
    shown = [
        [int(one) for batch in loader for one in accelerator.gather_for_metrics(batch)] for _ in range(EPOCHS)
    ]
    accelerator.end_training()
    return shown


@pytest.mark.parametrize("make", [shuffled, several_turns])
def test_ranks_share_the_plain_loaders_order_out(make: Any) -> None:
    plain = passes(make(seeded(3)))
    for shown in spawn(shares, 3, make):
        assert [sorted(each) for each in shown] == [sorted(each) for each in plain]
        # A global batch is three of the plain loader's.
        assert [sorted(each[:18]) for each in shown] == [sorted(each[:18]) for each in plain]


@pytest.mark.parametrize("generator", [seeded, drawn_from])
def test_a_position_in_a_later_epoch_is_the_plain_loaders(generator: Any) -> None:
    plain = passes(shuffled(generator(3)))
    first = Accelerator(cpu=True).prepare(shuffled(generator(3)))
    passes(first, 2)
    shown = [int(one) for _, batch in zip(range(2), first, strict=False) for one in batch]
    state = first.state_dict()
    # Another generator, as that of a script that was started with another seed.
    second = Accelerator(cpu=True).prepare(shuffled(seeded(9)))
    second.load_state_dict(state)
    assert shown + passes(second, 1)[0] == plain[2]
    third = Accelerator(cpu=True).prepare(shuffled(generator(3)))
    third.set_epoch(1)
    assert passes(third, 1)[0] == plain[1]
    assert passes(copy.deepcopy(third), 1)[0] == plain[2]


def test_states_of_format_1_go_on_in_their_order() -> None:
    loader = Accelerator(cpu=True).prepare(shuffled(seeded(3)))
    state = {**loader.state_dict(), "format": 1}
    del state["generator"]
    before = passes(loader, 1)
    loader.load_state_dict(state)
    assert loader._cursor.position.generator is None
    assert passes(loader, 1) != before
    loader.load_state_dict(state)
    other = Accelerator(cpu=True).prepare(shuffled(seeded(4)))
    other.load_state_dict(state)
    assert passes(loader, 1) == passes(other, 1)


def test_seeding_again_is_said() -> None:
    generator = seeded(3)
    plain = passes(shuffled(seeded(3)), 2)
    loader = Accelerator(cpu=True).prepare(shuffled(generator))
    assert passes(loader, 1)[0] == plain[0]
    generator.manual_seed(5)
    with pytest.warns(UserWarning, match="seeded again after prepare"):
        assert passes(loader, 1)[0] == plain[1]
