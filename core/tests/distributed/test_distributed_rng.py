from __future__ import annotations

import json
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.backend import RunSettings
from drivetrain.checkpoint import Encoder, decode
from drivetrain.distributed.current import World, set_current_backend
from drivetrain.distributed.rng import (
    capture_rng,
    restore_rng,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from drivetrain.errors import UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain_testing import spawn


def draw() -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),
        torch.rand(1).item(),
        random.gauss(0, 1),
        float(np.random.randn()),
    ]


def seeds(device_specific: bool) -> list[list[float]]:
    world = World(RunSettings(process=read_process_info(), device_type="cpu"))
    world.start()
    set_current_backend(world)
    set_seed(7, device_specific=device_specific)
    first = draw()
    set_seed(7, device_specific=device_specific)
    return [first, draw()]


def test_set_seed_repeats_and_tells_ranks_apart_when_asked() -> None:
    (a, a_again), (b, _) = spawn(seeds, 2, False)
    assert a == a_again == b
    (c, _), (d, _) = spawn(seeds, 2, True)
    assert c == a
    assert all(one != other for one, other in zip(c, d, strict=True))


def seeds_before_anything_is_connected() -> float:
    set_seed(7, device_specific=True)
    return torch.rand(1).item()


def test_a_device_specific_seed_needs_no_process_group() -> None:
    first, second = spawn(seeds_before_anything_is_connected, 2)
    assert first != second


def makes_deterministic() -> bool:
    set_seed(1, deterministic=True)
    return torch.are_deterministic_algorithms_enabled()


def test_deterministic() -> None:
    assert spawn(makes_deterministic, 1) == [True]


def test_a_seed_out_of_range_is_refused() -> None:
    for seed in (-1, 1 << 32):
        with pytest.raises(UsageError, match="out of range"):
            set_seed(seed)


def synchronises() -> list[list[float]]:
    world = World(RunSettings(process=read_process_info(), device_type="cpu"))
    rank = world.start().rank
    set_current_backend(world)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    apart = [*draw(), torch.rand(1, generator=generator).item()]
    synchronize_rng_states(["torch", "python", "numpy", "generator", "device"], generator, world)
    together = [*draw(), torch.rand(1, generator=generator).item()]
    with pytest.raises(UsageError, match="needs a generator"):
        synchronize_rng_state("generator")
    with pytest.raises(UsageError, match="'cuda' cannot be synchronised by a process on cpu"):
        synchronize_rng_state("cuda")
    return [apart, together]


def test_synchronize_gives_everyone_the_main_processs_state() -> None:
    (apart, together), (other_apart, other_together) = spawn(synchronises, 2)
    assert together == other_together
    assert all(one != other for one, other in zip(apart, other_apart, strict=True))


def through_a_checkpoint(tree: Any) -> Any:
    encoder = Encoder()
    node = json.loads(json.dumps(encoder.encode(tree, "rng")))
    return decode(node, encoder.tensors.__getitem__)


def as_older_versions_saved_it(tree: Any) -> Any:
    state = tree["numpy"]["state"]
    key = {"dtype": "uint32", "values": torch.from_numpy(state["key"].astype(np.int64))}
    return {**tree, "numpy": {**tree["numpy"], "state": {**state, "key": key}}}


def captures_and_restores() -> None:
    set_seed(3)
    draw()
    random.gauss(0, 1)  # Half of a pair is kept by each generator until the next draw.
    np.random.randn()
    for change in (lambda tree: tree, through_a_checkpoint, as_older_versions_saved_it):
        captured = change(capture_rng())
        wanted = draw()
        draw()
        restore_rng(captured)
        assert draw() == wanted


def test_a_captured_state_is_restored_exactly_also_through_a_checkpoint() -> None:
    spawn(captures_and_restores, 1)


def restores_another_devices(caplog: Any = None) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain.distributed.rng").addHandler(handler)
    captured = capture_rng()
    captured["device"] = {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
    restore_rng(captured)
    return records


def test_the_state_of_another_kind_of_device_is_left_out_with_a_word() -> None:
    [records] = spawn(restores_another_devices, 1)
    assert records == ["random state of cuda was saved, this process runs on cpu: its generator keeps its state."]


@pytest.mark.gpu
def test_the_accelerators_generator_is_captured_and_restored() -> None:
    device = f"{torch.accelerator.current_accelerator()}:0"
    captured = capture_rng(device)
    wanted = torch.rand(4, device=device)
    torch.rand(4, device=device)
    restore_rng(captured, device)
    assert torch.equal(torch.rand(4, device=device), wanted)


@pytest.mark.gpu
def test_a_state_is_restored_where_the_script_has_set_a_default_device() -> None:
    device = f"{torch.accelerator.current_accelerator()}:0"
    captured = capture_rng(device)
    with torch.device(device):
        restore_rng(captured, device)
        wanted = torch.rand(4)
        restore_rng(captured, device)
        assert torch.equal(torch.rand(4), wanted)
