from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.backend import RunSettings
from drivetrain.distributed.current import World, set_current_backend
from drivetrain.distributed.memory import (
    clear_device_cache,
    find_executable_batch_size,
    is_out_of_memory,
    release_memory,
)
from drivetrain.errors import UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain_testing import spawn


def test_release_memory_returns_a_none_for_each_object() -> None:
    a, b = release_memory(torch.ones(1), object())
    assert a is b is None
    assert release_memory() == []
    clear_device_cache()


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_batch_size_shrinks_until_it_fits_and_is_remembered() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, factor: int, *, plus: int) -> int:
        tried.append(batch_size)
        if batch_size > 80:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size * factor + plus

    assert train(2, plus=1) == 145
    assert tried == [100, 90, 81, 72]
    assert train(1, plus=0) == 72
    assert tried[4:] == [72]


@pytest.mark.parametrize("takes_size", [True, False])
def test_a_rule_of_ones_own(takes_size: bool) -> None:
    sizes = iter([32, 8])
    rule = (lambda size: size // 4) if takes_size else (lambda: next(sizes))

    def train(batch_size: int) -> int:
        if batch_size > 8:
            raise MemoryError
        return batch_size

    assert find_executable_batch_size(train, starting_batch_size=128, reduce_batch_size_fn=rule)() == 8


def test_other_errors_pass_and_nothing_that_fits_is_an_error() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def breaks(batch_size: int) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        breaks()

    @find_executable_batch_size(starting_batch_size=2)
    def never(batch_size: int) -> None:
        raise RuntimeError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="even with a batch size of 1") as caught:
        never()
    assert "CUDA out of memory" in str(caught.value.__cause__)

    @find_executable_batch_size(reduce_batch_size_fn=lambda size: size)
    def stuck(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(UsageError, match="from 128 to 128, which is not smaller"):
        stuck()


def test_the_caller_must_leave_the_batch_size_out() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: Any) -> None: ...

    for wrong in (lambda: train(64, "model"), lambda: train("model", batch_size=64)):
        with pytest.raises(UsageError, match="gets its batch size from find_executable_batch_size"):
            wrong()

    @find_executable_batch_size
    def nothing() -> None: ...

    with pytest.raises(UsageError, match="takes no batch size"):
        nothing()


def one_rank_runs_out() -> list[Any]:
    world = World(RunSettings(process=read_process_info(), device_type="cpu"))
    rank = world.start().rank
    set_current_backend(world)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda size: size // (2 + rank))
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if rank == 1 and batch_size > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    return [train(), tried]


def test_all_ranks_agree_on_the_size_when_one_runs_out() -> None:
    assert spawn(one_rank_runs_out, 2) == [[21, [64, 21]]] * 2
