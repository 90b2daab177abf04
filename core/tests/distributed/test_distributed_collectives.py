from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.distributed import collectives
from drivetrain.errors import UsageError
from drivetrain.topology import Mesh, ProcessInfo, Topology
from drivetrain_testing import spawn

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ODD = [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64]


def join(mesh: dict[str, int] | None = None) -> Topology:
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["WORLD_SIZE"]) == size
    process = ProcessInfo(rank, size, rank, size)
    return Topology(process, Mesh(mesh or {"dp_replicate": size}), "cpu", "gloo")


ALONE = Topology(ProcessInfo(), Mesh(), "cpu")


def moves_every_dtype() -> None:
    topology = join()
    for dtype in INTEGERS + FLOATS + ODD:
        mine = (torch.arange(6).reshape(3, 2) % 2 + topology.rank).to(dtype)
        gathered = collectives.all_gather(mine.t().contiguous().t(), topology)
        wanted = torch.cat([(torch.arange(6).reshape(3, 2) % 2 + rank).to(dtype) for rank in range(topology.dp_size)])
        assert gathered.dtype is dtype
        assert torch.equal(gathered.to(torch.complex64), wanted.to(torch.complex64)), dtype
        for shape in ((3, 2), (), (0, 4)):
            value = torch.full(shape, topology.rank + 1).to(dtype)
            before = value.clone()
            received = collectives.broadcast(value, 1, topology)
            assert received.shape == torch.Size(shape)
            assert torch.equal(received.to(torch.complex64), torch.full(shape, 2).to(dtype).to(torch.complex64)), dtype
            assert torch.equal(value.to(torch.complex64), before.to(torch.complex64))


def test_every_dtype_is_gathered_and_broadcast_without_loss() -> None:
    spawn(moves_every_dtype, 2)


def reduces_every_dtype() -> None:
    topology = join()
    size = topology.dp_size
    for dtype in [*INTEGERS, *FLOATS, torch.uint16]:
        mine = torch.full((2, 3), topology.rank + 1).to(dtype)
        before = mine.clone()
        for op, value in (("sum", size * (size + 1) / 2), ("max", size), ("min", 1), ("mean", (size + 1) / 2)):
            result = collectives.all_reduce(mine, op, topology)  # type: ignore[arg-type]
            wanted_dtype = torch.float32 if op == "mean" and dtype in [*INTEGERS, torch.uint16] else dtype
            assert result.dtype is wanted_dtype, (dtype, op)
            assert torch.equal(result.double(), torch.full((2, 3), value, dtype=torch.float64)), (dtype, op)
            assert torch.equal(mine.double(), before.double())
    flag = torch.tensor([topology.rank == 1, False])
    assert collectives.all_reduce(flag, "max", topology).tolist() == [True, False]
    assert collectives.all_reduce(flag, "min", topology).tolist() == [False, False]
    assert collectives.all_reduce(~flag, "sum", topology).tolist() == [size - 1, size]
    assert collectives.all_reduce(~flag, "mean", topology)[1].item() == 1.0
    parameter = torch.ones(2, requires_grad=True)
    assert not collectives.all_reduce(parameter, "sum", topology).requires_grad


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_dtype_is_reduced(world_size: int) -> None:
    spawn(reduces_every_dtype, world_size)


def sums_many_small_halves() -> list[float]:
    topology = join()
    value = torch.tensor(2048.0 if topology.rank == 0 else 1.0, dtype=torch.float16)
    return [collectives.all_reduce(value, op, topology).item() for op in ("sum", "mean")]  # type: ignore[arg-type]


def test_halves_are_added_in_float32() -> None:
    # 2048 + 1 is 2048 in float16: added one by one the three ones would vanish. 2051 rounds to 2052.
    assert spawn(sums_many_small_halves, 4)[0] == [2052.0, 513.0]


def test_alone_every_collective_is_local_and_keeps_the_dtype_rules() -> None:
    value = torch.tensor([3, 5])
    assert torch.equal(collectives.all_gather(value, ALONE), value)
    mean = collectives.all_reduce(value, "mean", ALONE)
    assert mean.dtype is torch.float32
    assert mean.tolist() == [3.0, 5.0]
    assert collectives.all_reduce(torch.tensor([True]), "sum", ALONE).dtype is torch.int64
    assert collectives.broadcast(value, 0, ALONE) is not value
    assert collectives.all_gather_object({"a": 1}, ALONE) == [{"a": 1}]
    assert collectives.broadcast_object("x", 0, ALONE) == "x"
    collectives.barrier(ALONE)


def test_mistakes_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown reduction 'avg'"):
        collectives.all_reduce(torch.ones(1), "avg", ALONE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0-d"):
        collectives.all_gather(torch.tensor(1), ALONE)
    with pytest.raises(UsageError, match="not defined"):
        collectives.all_reduce(torch.ones(1, dtype=torch.complex64), "max", ALONE)
    with pytest.raises(UsageError, match="process 1 cannot send"):
        collectives.broadcast(torch.ones(1), 1, ALONE)
    with pytest.raises(UsageError, match="process -1 cannot send"):
        collectives.broadcast_object(1, -1, ALONE)


def runs_on_a_mesh(axes: dict[str, int]) -> list[Any]:
    topology = join(axes)
    rank = torch.tensor([topology.rank])
    assert collectives.dp_group(topology) is collectives.dp_group(topology)
    return [
        collectives.all_gather(rank, topology).tolist(),
        collectives.all_reduce(rank, "sum", topology).tolist(),
        collectives.all_gather_object(topology.rank, topology),
        collectives.broadcast(rank, 3, topology).tolist(),
        collectives.broadcast_object(topology.rank, 2, topology),
    ]


def test_gather_and_reduce_stay_in_the_data_parallel_group() -> None:
    inner = spawn(runs_on_a_mesh, 4, {"dp_shard": 2, "tp": 2})
    assert inner == [[g, [sum(g)], g, [3], 2] for g in ([0, 2], [1, 3], [0, 2], [1, 3])]
    outer = spawn(runs_on_a_mesh, 4, {"pp": 2, "dp_replicate": 2})
    assert outer == [[g, [sum(g)], g, [3], 2] for g in ([0, 1], [0, 1], [2, 3], [2, 3])]
    whole = spawn(runs_on_a_mesh, 4, {"tp": 4})
    assert whole == [[[rank], [rank], [rank], [3], 2] for rank in range(4)]


def passes_the_barrier_in_order(path: str) -> bool:
    from pathlib import Path

    topology = join()
    if topology.rank == 1:
        Path(path).write_text("here")
    collectives.barrier(topology)
    return Path(path).exists()


def test_barrier_holds_everyone_back(tmp_path: Any) -> None:
    assert spawn(passes_the_barrier_in_order, 2, str(tmp_path / "mark")) == [True, True]
