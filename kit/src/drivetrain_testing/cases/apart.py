"""Checks that differing ranks are reported: loaders that hold one rank's part, and calls for different batches.

Comparison is the core's; an engine must leave it alone, and must itself train in the same way on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from drivetrain import already_sharded
from drivetrain.distributed import call_monitor
from drivetrain.errors import UsageError
from drivetrain_testing import models
from drivetrain_testing.kit import Kit, case

SAMPLES, ROWS = 24, 2


def _data() -> TensorDataset:
    return TensorDataset(*models.dense_data(SAMPLES))


def _part(accelerator: Any) -> Subset[Any]:
    """The samples that a script has picked for this process."""
    return Subset(_data(), range(accelerator.process_index, SAMPLES, accelerator.num_processes))


class _InOrder(Sampler[int]):
    """A sampler of the script's own."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def _accelerator(kit: Kit) -> Any:
    return kit.with_config(rank_monitor={"interval_seconds": 0.5}).accelerator()


def _alone(accelerator: Any) -> bool:
    """Whether there is one process, or no process group through whose store processes could compare."""
    return accelerator.num_processes == 1 or call_monitor.Current.monitor is None


def _assert_told(kit: Kit, accelerator: Any, train: Callable[[], None], words: str, what: str) -> None:
    """Train and end; the rank must have raised for differing calls by then.

    It raises that error, or fails in a collective that another rank has left.
    """
    monitor = call_monitor.Current.monitor
    assert monitor is not None
    try:
        train()
        accelerator.end_training()
    except RuntimeError:
        # The report is what counts; what a script that fails leaves to the interpreter's end.
        kit.made.remove(accelerator)
        accelerator._close()  # noqa: SLF001
    assert monitor.error is not None, f"{what}: no error, neither at the end"
    said = str(monitor.error)
    assert words in said, f"{what}: the report does not say {words!r}: {said}"


def _refused(prepare: Callable[[], Any], words: str, what: str) -> None:
    said = ""
    try:
        prepare()
    except UsageError as error:
        said = str(error)
    assert said, f"{what}: no error in prepare, and samples are left out"
    assert words in said, f"{what}: the error does not say {words!r}: {said}"


@case()
def parts_of_the_data(kit: Kit) -> None:
    """A loader of the part that a script has picked for its process is refused; marked, or whole, it is prepared."""
    accelerator = kit.accelerator()
    model: Any = models.build("dense")
    kind = type(model)
    if accelerator.num_processes > 1:
        loader = DataLoader(_part(accelerator), ROWS)
        _refused(lambda: accelerator.prepare(model, loader), "already_sharded", "a loader of this rank's part")
        assert type(model) is kind, "prepare has changed the model, although it refused the loader"
    whole: Any = accelerator.prepare(DataLoader(_data(), ROWS))
    assert whole.number == 0, "a loader that was refused is counted"
    if accelerator.backend.topology.dp_size == accelerator.num_processes:
        marked: Any = accelerator.prepare(already_sharded(DataLoader(_part(accelerator), ROWS)))
        assert sum(len(x) for x, _ in marked) == SAMPLES // accelerator.num_processes


@case()
def settings_of_loaders(kit: Kit) -> None:
    """A batch size of its own on each rank is refused."""
    accelerator = kit.accelerator()
    if accelerator.num_processes > 1:
        loader = DataLoader(_data(), ROWS + accelerator.process_index)
        _refused(lambda: accelerator.prepare(loader), "batch_size", "a batch size for each rank")


@case()
def order_of_each_rank(kit: Kit) -> None:
    """A sampler of the script's own that gives each rank another order is found in the first pass."""
    accelerator = _accelerator(kit)
    if _alone(accelerator):
        return
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(accelerator.process_index)).tolist()
    loader: Any = accelerator.prepare(DataLoader(_data(), ROWS, sampler=_InOrder(order)))

    def train() -> None:
        for _ in loader:
            pass

    what = "a sampler with another order on each rank"
    _assert_told(kit, accelerator, train, "different samples in loader 0", what)


def _prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model: Any = models.build("dense")
    prepared: tuple[Any, Any, Any] = accelerator.prepare(
        model, SGD(model.parameters(), lr=0.1), DataLoader(_data(), ROWS)
    )
    return prepared


def _step(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


@case()
def skipped_batches(kit: Kit) -> None:
    """Ranks that skip different batches by ``continue`` raise; without that, nothing hangs and sums mix batches."""
    accelerator = _accelerator(kit)
    topology = accelerator.backend.topology
    # Engines whose ranks compute one batch together compare its values themselves.
    if _alone(accelerator) or topology.dp_size == 1:
        return
    model, optimizer, loader = _prepared(accelerator)

    def train() -> None:
        for index, (x, y) in enumerate(loader):
            if index != topology.dp_rank % 2:
                _step(accelerator, model, optimizer, x, y)

    _assert_told(kit, accelerator, train, "gradients of different batches", "ranks that skip different batches")


@case()
def right_training_agrees(kit: Kit) -> None:
    """Ranks that train alike are found to: nothing that the engine does differs among them."""
    accelerator = _accelerator(kit)
    model, optimizer, loader = _prepared(accelerator)
    for x, y in loader:
        _step(accelerator, model, optimizer, x, y)
    call_monitor.agree()


@contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("drivetrain")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@case()
def loader_that_was_not_prepared(kit: Kit) -> None:
    """The main process warns, once, where all ranks train on the same rows, and does not where a loader shares them."""
    accelerator = _accelerator(kit)
    with _log() as lines:
        model, optimizer, loader = _prepared(accelerator)
        x, y = next(iter(DataLoader(_data(), 4 * ROWS)))
        for _ in range(2):
            _step(accelerator, model, optimizer, x.to(accelerator.device), y.to(accelerator.device))
        call_monitor.agree()
    found = [line for line in lines if "same inputs" in line]
    compared = not _alone(accelerator) and accelerator.device.type != "xla"  # reading a lazy tensor would run it
    expected = compared and accelerator.backend.topology.dp_size > 1 and accelerator.is_main_process
    assert len(found) == expected, f"{len(found)} warnings of a loader that was not prepared, {int(expected)} expected"
    with _log() as lines:
        again: Any = models.build("dense")
        again, optimizer = accelerator.prepare(again, SGD(again.parameters(), lr=0.1))
        for x, y in loader:
            _step(accelerator, again, optimizer, x, y)
        call_monitor.agree()
    assert not [line for line in lines if "same inputs" in line], "batches of a prepared loader are said to be the same"
