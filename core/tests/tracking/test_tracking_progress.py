from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm as original

from drivetrain import Accelerator, progress
from drivetrain.logging import set_rank
from drivetrain.progress import tqdm


def test_it_gives_back_every_item_on_every_process(capsys):
    assert list(tqdm(range(25))) == list(range(25))
    assert "25/25" in capsys.readouterr().err
    set_rank(1, 2)
    assert list(tqdm(range(25))) == list(range(25))
    assert capsys.readouterr().err == ""
    assert list(tqdm(range(3), main_process_only=False)) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err


def test_a_bar_that_is_not_shown_counts_and_has_the_methods_of_one_that_is(capsys):
    bars = []
    for rank in (0, 1):
        set_rank(rank, 2)
        bar = tqdm(None, "train", 4, True, None, 80, mininterval=0)
        bar.set_postfix_str("warm")
        bar.reset(total=7)
        bar.update(5)
        bar.refresh()
        bar.set_description("more")
        bars.append(bar)
    shown, quiet = bars
    assert "5/7" in capsys.readouterr().err
    assert (shown.n, quiet.n, quiet.disable) == (5, 5, False)
    assert vars(shown).keys() == vars(quiet).keys()
    for name in ("n", "total", "desc", "postfix", "leave", "unit", "initial"):
        assert getattr(quiet, name) == getattr(shown, name), name
    quiet.close()
    assert capsys.readouterr().err == ""
    shown.close()
    # As tqdm has it: a bar that the script has switched off is off.
    assert tqdm(range(3), disable=True).disable


def test_it_is_tqdms_own_object():
    with tqdm(total=4, desc="train", disable=True) as bar:
        bar.update(2)
    assert isinstance(bar, original)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves, so that no machine's speed is measured."""
    at = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: at[0])
    return at


class Slow(Dataset):
    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.clock[0] += 0.1
        return torch.ones(2)


@pytest.fixture
def loader(clock):
    return Accelerator(cpu=True).prepare(DataLoader(Slow(clock), batch_size=4))


def test_over_a_prepared_loader_it_says_where_the_time_goes(loader, clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_most_memory", lambda: 3 * 2**20)
    bar = tqdm(loader, mininterval=0, miniters=1, ncols=200)
    for _ in bar:
        clock[0] += 0.6
        bar.set_postfix(loss=0.5)
    # Four samples of 0.1 s each, then 0.6 s of work; the prepared loader reads a batch ahead, but one for each batch.
    assert "4.0 samples/s, 1000 ms/batch, 40% waiting for data" in capsys.readouterr().err
    assert bar.format_dict["postfix"].endswith("data, 3 MiB, loss=0.5")
    assert bar.iterable is loader


def test_its_numbers_begin_anew_with_each_epoch(loader, clock, capsys):
    for work in (0.6, 3.6):
        capsys.readouterr()
        for _ in tqdm(loader, mininterval=0, miniters=1, ncols=200):
            clock[0] += work
    assert "1.0 samples/s, 4000 ms/batch, 10% waiting for data" in capsys.readouterr().err


def test_batches_of_before_a_resume_are_not_counted(loader, clock, capsys):
    for _ in tqdm(loader, initial=90, mininterval=0, miniters=1, ncols=200):
        clock[0] += 0.6
    assert "4.0 samples/s, 1000 ms/batch" in capsys.readouterr().err


def test_the_memory_is_that_of_this_process_in_bytes(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    held = bytearray(b"x") * 2**26
    # No process with torch is smaller; in the kilobytes that Linux counts it would be 65536.
    assert len(held) <= progress._most_memory() < 2**50


def test_a_loader_that_is_not_prepared_has_tqdms_bar(clock, capsys):
    assert len(list(tqdm(DataLoader(Slow(clock), batch_size=4)))) == 10
    assert "samples/s" not in capsys.readouterr().err
