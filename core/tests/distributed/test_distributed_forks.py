"""A forked process, as a DataLoader's worker is, leaves alone what only the process that made it can destroy."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain_testing import spawn


class Collecting(Dataset):
    """Collects garbage wherever it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def read_beside_a_group_that_is_garbage() -> list[int]:
    accelerator = Accelerator(cpu=True)
    gc.disable()
    cycle: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))]
    cycle.append(cycle)
    del cycle
    read = [int(batch) for batch in DataLoader(Collecting(), num_workers=2, timeout=20)]
    gc.enable()
    accelerator.end_training()
    return read


def test_workers_leave_the_process_groups_of_their_parent_alone() -> None:
    assert spawn(read_beside_a_group_that_is_garbage, 2) == [[0, 1, 2, 3]] * 2
