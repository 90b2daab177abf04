"""Between real processes on gloo: dispatch, seeds, and the user's own way to resume."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_cases import gathered, numbers, run, same
from torch.utils.data import DataLoader

from drivetrain.data.loader import prepare_data_loader
from drivetrain.data.metrics import gather_for_metrics
from drivetrain.errors import DrivetrainError
from drivetrain_testing import spawn


def run_case(name: str, kwargs: dict[str, Any]) -> Any:
    return run(CASES[name], kwargs)


def on(world: int, name: str, **kwargs: Any) -> list[Any]:
    return spawn(run_case, world, name, kwargs)


class MainOnly(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        assert int(os.environ["RANK"]) == 0, "only the main process may read"
        return {"x": torch.tensor(index), "word": f"w{index}"}


def ragged_collate(samples):
    longest = max(int(each["x"]) for each in samples) + 1
    return torch.stack([torch.arange(longest) * 0 + each["x"] for each in samples])


def dispatch(context):
    shown = []
    loader = prepare_data_loader(DataLoader(MainOnly(), batch_size=2, shuffle=True), context)
    for batch in loader:
        assert len(batch["word"]) == len(batch["x"])
        both = gather_for_metrics(batch, context)
        assert both["word"] == [f"w{index}" for index in both["x"].tolist()]
        shown += both["x"].tolist()
    ragged = prepare_data_loader(DataLoader(MainOnly(), 2, collate_fn=ragged_collate), context)
    lengths = [batch.shape for batch in ragged]
    lists = DataLoader(MainOnly(), batch_sampler=[[0, 1, 2], [3], [4]])
    rounds = [batch["x"].tolist() for batch in prepare_data_loader(lists, context)]
    whole = [gather_for_metrics(batch["x"], context).tolist() for batch in prepare_data_loader(lists, context)]
    uneven = context.config.even_batches, len(list(prepare_data_loader(DataLoader(MainOnly(), batch_size=3), context)))
    return shown, [tuple(shape) for shape in lengths], rounds, whole, uneven


def test_the_main_process_reads_for_all():
    results = on(2, "dispatch", dispatch_batches=True)
    assert sorted(same([result[0] for result in results])) == list(range(10))
    # The global batch is collated as one, so that its ragged rows agree in length (accelerate#2023).
    assert results[0][1] == results[1][1] == [(2, 4), (2, 8), (1, 10)]
    assert [result[2] for result in results] == [[[0, 1, 2], [4]], [[3], [0, 1, 2]]]
    assert same([result[3] for result in results]) == [[0, 1, 2, 3], [4]]


def test_dispatch_with_a_rank_that_gets_no_last_batch():
    results = on(4, "dispatch_uneven", dispatch_batches=True, even_batches=False)
    assert results == [[[0, 1], [8]], [[2, 3]], [[4, 5]], [[6, 7]]]


def dispatch_uneven(context):
    shown = []
    for batch in numbers(context, 9, 2):
        shown.append(batch.tolist())
        if len(shown) == 1:
            # Anything collective between batches must not be mistaken for the loader's.
            assert context.backend.gather_object(context.dp_rank) == [0, 1, 2, 3]
    context.backend.barrier()
    return shown


def broken(context):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 6:
                raise OSError("unreadable")
            return index

    loader = prepare_data_loader(DataLoader(Broken(), batch_size=1), context)
    with pytest.raises((OSError, DrivetrainError), match="unreadable") as caught:
        list(loader)
    return type(caught.value).__name__


def test_a_reader_that_fails_stops_every_rank():
    assert on(2, "broken", dispatch_batches=True) == ["OSError", "DrivetrainError"]


def sliced(context):
    def slice_fn(batch, tensor_slice, process_index, num_processes):
        assert num_processes == 2
        return process_index, batch[tensor_slice].tolist()

    made = DataLoader(range(8), batch_size=2)
    return list(prepare_data_loader(made, context, slice_fn_for_dispatch=slice_fn))


def test_a_slice_function_cuts_the_global_batch():
    assert on(2, "sliced", dispatch_batches=True) == [[(0, [0, 1]), (0, [4, 5])], [(1, [2, 3]), (1, [6, 7])]]
    with pytest.raises(Exception, match="slice_fn_for_dispatch is used with dispatch only"):
        on(2, "sliced")


# ---- seeds and randomness -------------------------------------------------------------------------------------------


def generators(context):
    """Generators that differ by rank: the main process's decides."""
    made = DataLoader(range(12), shuffle=True, generator=torch.Generator().manual_seed(context.dp_rank))
    return gathered(prepare_data_loader(made, context), context)


def test_ranks_with_generators_of_their_own_agree():
    shown = same(on(2, "generators"))
    assert sorted(shown) == list(range(12))
    assert shown == on(1, "generators")[0]


def synchronised(context):
    """``rng_types`` brings random states in step at the beginning of each pass."""
    context = replace(context, rng_types=("generator", "torch"))
    return next(float(torch.rand(())) for _ in numbers(context, 4))


def test_rng_types_synchronise_each_pass():
    same(on(2, "synchronised"))


def only_one_rank(context):
    """Iterating is not collective: a loader may be iterated by one rank alone."""
    loader = numbers(context, 8, 2, shuffle=True)
    shown = [batch.tolist() for batch in loader] if context.dp_rank == 1 else []
    context.backend.barrier()
    return len(shown)


def test_one_rank_may_iterate_alone():
    assert on(2, "only_one_rank") == [0, 2]


# ---- the user's own way ---------------------------------------------------------------------------------------------


def train(folder: str, stop: int | None, resume: bool, workers: int) -> list[list[int]]:
    """Three epochs in batches of 4 over all ranks; stops in the middle, or goes on, without a word about data."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    made = DataLoader(range(22), batch_size=4 // accelerator.num_processes, shuffle=True, num_workers=workers)
    loader = accelerator.prepare(made)
    if resume:
        with warnings.catch_warnings():
            # A larger world has ranks whose random state nobody saved; the order of samples does not depend on it.
            warnings.filterwarnings("ignore", "the checkpoint holds the random state")
            accelerator.load_state(folder)
    epochs: list[list[int]] = []
    while loader.epoch < 3:
        epochs.append([])
        for step, batch in enumerate(loader):
            epochs[-1] += accelerator.gather_for_metrics(batch).tolist()
            if len(epochs) == 2 and step == stop:
                accelerator.save_state(folder)
                accelerator.end_training()
                return epochs
    accelerator.end_training()
    return epochs


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.gate("5-1-2", "5-4-2", "1-2-4")
def test_a_run_goes_on_with_the_samples_that_are_left(tmp_path, saved_by, resumed_by, stop):
    folder = str(tmp_path / "state")
    before = same(spawn(train, saved_by, folder, stop, False, 0))
    after = same(spawn(train, resumed_by, folder, None, True, 0))
    assert sorted(before[0]) == list(range(22))
    assert sorted(before[1] + after[0]) == list(range(22))
    assert [sorted(epoch) for epoch in after[1:]] == [list(range(22))]
    assert after[1] != before[0]


def test_workers_that_read_ahead_lose_nothing(tmp_path):
    folder = str(tmp_path / "state")
    before = same(spawn(train, 2, folder, 1, False, 1))
    after = same(spawn(train, 1, folder, None, True, 0))
    assert sorted(before[1] + after[0]) == list(range(22))


CASES = {
    function.__name__: function
    for function in (dispatch, dispatch_uneven, broken, sliced, generators, synchronised, only_one_rank)
}
