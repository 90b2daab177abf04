"""Checks data loaders: each sample is seen once an epoch, by one rank, and all ranks take the same number of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.distributed.collectives import Ranks
from drivetrain_testing.kit import Kit, case


def _loader(num_samples: int, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    numbers = torch.arange(num_samples)
    return DataLoader(TensorDataset(numbers, numbers * 0.5), batch_size=batch_size, shuffle=shuffle)


@case(guards="pytorch#31771")
def shuffled_epochs(kit: Kit) -> None:
    """A shuffled epoch shows each sample once over all ranks; the next one does so in another order."""
    accelerator = kit.accelerator()
    loader: Any = accelerator.prepare(_loader(24, 2, shuffle=True))
    epochs = [
        [number for batch, _ in loader for number in accelerator.gather_for_metrics(batch).tolist()] for _ in range(2)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(24)), f"shown: {sorted(epoch)}"
        assert epoch != list(range(24)), "not shuffled"
    assert epochs[0] != epochs[1], "two epochs in one order"


@case()
def ranks_share_the_samples(kit: Kit) -> None:
    """Ranks of one data-parallel coordinate see the same batches, ranks of different ones have no sample in common."""
    accelerator = kit.accelerator()
    loader: Any = accelerator.prepare(_loader(24, 2, shuffle=True))
    mine = [number for batch, _ in loader for number in batch.tolist()]
    everyones = Ranks(accelerator.backend).gather((accelerator.backend.topology.dp_rank, mine))
    seen: dict[int, list[int]] = {}
    for coordinate, numbers in everyones:
        assert seen.setdefault(coordinate, numbers) == numbers, f"ranks at coordinate {coordinate} see other samples"
    together = [number for numbers in seen.values() for number in numbers]
    assert len(together) == len(set(together)), "a sample was shown to two data-parallel ranks"


@case(guards="microsoft/PyMarlin#80")
def equally_many_batches(kit: Kit) -> None:
    """However the samples divide, every rank gets as many batches as ``len`` says, so that no rank waits for ever."""
    accelerator = kit.accelerator()
    for num_samples, batch_size in ((13, 2), (5, 4), (1, 1)):
        loader: Any = accelerator.prepare(_loader(num_samples, batch_size, shuffle=False))
        counted = sum(1 for _ in loader)
        assert counted == len(loader), f"{counted} batches, len says {len(loader)}"
        assert len(set(Ranks(accelerator.backend).gather(counted))) == 1, "ranks take different numbers of steps"


@case()
def batches_come_to_the_device(kit: Kit) -> None:
    """Every tensor of a batch is on this rank's device, with its dtype and value."""
    accelerator = kit.accelerator()
    loader: Any = accelerator.prepare(_loader(8, 2, shuffle=False))
    for numbers, halves in loader:
        assert numbers.device.type == halves.device.type == accelerator.device.type, f"a batch is on {numbers.device}"
        assert numbers.dtype == torch.int64
        assert halves.dtype == torch.float32
        assert torch.equal(numbers * 0.5, halves)
