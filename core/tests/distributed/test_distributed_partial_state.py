from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.compat.state import PartialState
from drivetrain.distributed import nested
from drivetrain.distributed.current import current_backend, forget_backend, set_current_backend
from drivetrain.errors import EnvironmentVariableError, UsageError
from drivetrain_testing import spawn


def joins() -> list[Any]:
    state = PartialState(cpu=True)
    again = PartialState()
    assert again.process_index == state.process_index
    assert state.initialized
    assert not state.debug
    state.set_device()
    state.wait_for_everyone()
    facts = [state.num_processes, state.process_index, state.backend, state.distributed_type, str(state.device)]
    assert nested.gather_object([state.process_index]) == list(range(state.num_processes))
    state.destroy_process_group()
    state.destroy_process_group()
    assert not dist.is_initialized()
    return facts


def test_partial_state_joins_the_processes_and_leaves_nothing() -> None:
    assert spawn(joins, 1) == [[1, 0, None, "single", "cpu"]]
    assert spawn(joins, 2) == [[2, rank, "gloo", "ddp", "cpu"] for rank in range(2)]


def used_in_passing() -> list[Any]:
    index = PartialState(cpu=True).process_index
    gc.collect()
    total = nested.reduce(__import__("torch").tensor(index), "sum").item()
    held = [PartialState().num_processes for _ in range(20)]
    PartialState().destroy_process_group()
    return [total, set(held), dist.is_initialized()]


def test_states_that_nobody_keeps_share_one_process_group() -> None:
    assert spawn(used_in_passing, 2) == [[1, {2}, False]] * 2


def shapes_the_group() -> list[Any]:
    state = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=77))
    options = dist.group.WORLD._get_backend(__import__("torch").device("cpu")).options  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="timeout can no longer be chosen"):
        PartialState(timeout=timedelta(seconds=5))
    return [state.backend, options._timeout.total_seconds()]


def test_keyword_arguments_reach_the_process_group_or_are_refused() -> None:
    assert spawn(shapes_the_group, 2) == [["gloo", 77.0]] * 2
    with pytest.raises(UsageError, match="PartialState does not know bucket"):
        PartialState(bucket=3)
    with pytest.raises(UsageError, match=r"timeout must be a datetime\.timedelta, not int"):
        PartialState(timeout=30)


def starts() -> None:
    PartialState()


def test_a_half_set_environment_is_refused() -> None:
    with pytest.raises(AssertionError) as caught:
        spawn(starts, 2, env={"LOCAL_RANK": None})
    assert isinstance(getattr(caught.value, "cause", None), EnvironmentVariableError)


def is_reset() -> list[Any]:
    first = PartialState(cpu=True)
    PartialState._reset_state()
    gone = dist.is_initialized()
    return [first.process_index, gone]


def test_reset_state_gives_the_process_group_back() -> None:
    assert spawn(is_reset, 2) == [[0, False], [1, False]]


def takes_the_newest() -> None:
    from drivetrain.backend import RunSettings
    from drivetrain.distributed.current import World

    first, second = World(RunSettings()), World(RunSettings())
    for world in (first, second):
        world.start()
        set_current_backend(world)
    assert current_backend() is second
    forget_backend(second)
    assert current_backend() is first
    set_current_backend(second)
    del second, world
    gc.collect()
    assert current_backend() is first
    del first
    gc.collect()
    assert current_backend().topology.world_size == 1


def test_the_newest_living_backend_is_current() -> None:
    spawn(takes_the_newest, 1)


def reads_the_configuration() -> list[Any]:
    state = PartialState()
    return [str(state.device), state.debug]


def test_the_configuration_is_read() -> None:
    env = {"DRIVETRAIN_USE_CPU": "true", "DRIVETRAIN_DEBUG": "true"}
    assert spawn(reads_the_configuration, 1, env=env) == [["cpu", True]]
