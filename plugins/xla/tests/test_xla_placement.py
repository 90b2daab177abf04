"""Batch placement: batches are brought ahead by a thread, and filled up to one shape. Needs no torch_xla."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.api.engines import trees
from drivetrain_xla.placement import BatchPlacement, fill


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


def place(accelerator, send=lambda tensor: tensor, **settings) -> BatchPlacement:
    """Let this run's batches be placed as under ``xla``."""
    placement = BatchPlacement(send, **settings)
    accelerator.backend.place_batch = placement.place
    return placement


def feeders():
    return [each for each in threading.enumerate() if each.name.startswith("drivetrain-batches")]


def loader(samples: int, batch_size: int) -> DataLoader:
    numbers = torch.arange(samples)
    return DataLoader(TensorDataset(numbers.float(), numbers), batch_size=batch_size)


def test_a_batch_is_filled_with_its_own_rows_and_labels_that_do_not_count():
    x, y = fill((torch.tensor([[1.0], [2.0]]), torch.tensor([5, 6])), 2, 5, -100)
    assert x.flatten().tolist() == [1, 2, 1, 2, 1]
    assert y.tolist() == [5, 6, -100, -100, -100]


def test_a_batch_with_names():
    batch = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[3, 4]]), "names": ["a"], "scale": 2.0}
    found = fill(batch, 1, 3, -1)
    assert found["input_ids"].tolist() == [[1, 2]] * 3
    assert found["labels"].tolist() == [[3, 4], [-1, -1], [-1, -1]]
    assert found["names"] == ["a", "a", "a"]
    assert found["scale"] == 2.0
    assert batch["labels"].tolist() == [[3, 4]], "the script's own batch stays as it was"


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(3),
        (torch.arange(3),),
        (torch.arange(3), torch.rand(3)),
        {"x": torch.arange(3)},
        (torch.arange(3), torch.tensor(1)),
    ],
    ids=["bare", "alone", "floating", "no-labels", "no-rows"],
)
def test_without_integer_labels_nothing_is_filled(batch):
    assert fill(batch, 3, 5, -100) is None


def test_filled_rows_weigh_on_no_metric(accelerator):
    place(accelerator, filler=-100)
    prepared = accelerator.prepare(loader(11, 4))
    sizes, gathered = [], []
    for x, y in prepared:
        sizes.append(len(x))
        gathered += accelerator.gather_for_metrics(y).tolist()
    assert sizes == [4, 4, 4]
    assert gathered == list(range(11))


def test_a_batch_that_cannot_be_filled_is_told(accelerator, caplog):
    place(accelerator, filler=-100)
    sizes = [len(x) for (x,) in accelerator.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=4))]
    assert sizes == [4, 1]
    assert "no integer labels" in caplog.text


def test_the_next_batch_comes_by_a_thread_and_samples_are_read_by_the_script(accelerator):
    came, read = [], []

    class Watched(TensorDataset):
        def __getitem__(self, index):
            read.append(threading.current_thread())
            return super().__getitem__(index)

    def send(tensor):
        came.append(threading.current_thread())
        return tensor.clone()

    placement = place(accelerator, send, ahead=True)
    data = Watched(torch.arange(6.0), torch.arange(6))
    seen = [y.tolist() for _, y in accelerator.prepare(DataLoader(data, batch_size=2))]
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert len(came) == 6
    assert threading.main_thread() not in came
    assert set(read) == {threading.main_thread()}
    placement.close()
    assert not feeders()


def test_what_has_a_way_of_its_own_moves_in_the_scripts_thread():
    moved = []

    class Batch(dict):
        def to(self, device, non_blocking=False):
            moved.append((threading.current_thread(), device))
            return self

    placement = BatchPlacement(lambda tensor: tensor + 1, ahead=True)
    try:
        shown, rows = placement.place(Batch(x=torch.zeros(2)), 2, 2, lambda batch: trees.send_to_device(batch, "cpu"))
        assert shown()["x"].tolist() == [1, 1]
        assert rows == 2
    finally:
        placement.close()
    assert moved == [(threading.main_thread(), "cpu")]


def test_an_error_on_the_way_is_raised_where_the_batch_is_shown(accelerator):
    def fail(_):
        raise RuntimeError("no room on the device")

    placement = place(accelerator, fail, ahead=True)
    with pytest.raises(RuntimeError, match="no room"):
        list(accelerator.prepare(loader(4, 2)))
    placement.close()


def test_passes_that_are_broken_off_share_one_thread_and_leave_none(accelerator):
    placement = place(accelerator, ahead=True)
    prepared = accelerator.prepare(loader(8, 2))
    for _ in range(3):
        for _ in prepared:
            break
    assert len(feeders()) == 1
    placement.close()
    assert not feeders()


def test_a_loss_over_filled_rows_is_gathered_without_a_warning(accelerator):
    """Rows that a loss ignores do not weigh in it (warnings are errors here)."""
    place(accelerator, filler=-100)
    losses = [accelerator.gather_for_metrics(y[y >= 0].float().mean()) for _, y in accelerator.prepare(loader(6, 4))]
    assert torch.cat(losses).tolist() == [1.5, 4.5]
