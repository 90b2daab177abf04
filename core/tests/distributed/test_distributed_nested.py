from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from drivetrain.backend import RunSettings
from drivetrain.distributed import nested
from drivetrain.distributed.current import World, set_current_backend
from drivetrain.errors import CollectiveMismatchError, UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain_testing import spawn


class Pair(NamedTuple):
    left: Any
    right: Any


def started() -> World:
    world = World(RunSettings(process=read_process_info(), device_type="cpu"))
    world.start()
    set_current_backend(world)
    return world


class Counting(dict[str, int]):
    """How often each collective of a backend runs."""

    def watch(self, backend: World, *names: str) -> None:
        for name in names:
            inner = getattr(backend, name)

            def run(*args: Any, _inner: Any = inner, _name: str = name, **kwargs: Any) -> Any:
                self[_name] = self.get(_name, 0) + 1
                return _inner(*args, **kwargs)

            setattr(backend, name, run)


def gathers_a_tree() -> dict[str, Any]:
    world = started()
    rank = world.topology.rank
    tree = {
        "x": torch.full((2, 3), rank),
        "y": Pair(torch.tensor(float(rank)), None),
        "z": [torch.tensor([rank % 2 == 1])],
        "big": torch.full((nested.TOGETHER_BYTES, 2), rank, dtype=torch.int64),
        "empty": torch.ones(0, 4),
        "half": torch.full((1,), rank + 0.5, dtype=torch.bfloat16),
        "grad": torch.full((1,), float(rank), requires_grad=True),
    }
    calls = Counting()
    calls.watch(world, "gather")
    out = nested.gather(tree)
    assert isinstance(out["y"], Pair)
    assert out["empty"].shape == (0, 4)
    assert not out["grad"].requires_grad
    assert out["big"].shape == (world.topology.dp_size * nested.TOGETHER_BYTES, 2)
    assert torch.equal(out["big"][:: nested.TOGETHER_BYTES, 0], torch.arange(world.topology.dp_size))
    return {
        "x": out["x"].tolist(),
        "y": [out["y"].left.tolist(), out["y"].right],
        "z": out["z"][0].tolist(),
        "half": (out["half"].dtype is torch.bfloat16, out["half"].tolist()),
        "calls": calls["gather"],
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather_concatenates_every_leaf_by_rank(size: int) -> None:
    for out in spawn(gathers_a_tree, size):
        assert out["x"] == [[rank] * 3 for rank in range(size) for _ in range(2)]
        assert out["y"] == [[float(rank) for rank in range(size)], None]
        assert out["z"] == [rank % 2 == 1 for rank in range(size)]
        assert out["half"] == (True, [rank + 0.5 for rank in range(size)])
        # The digest where there are several ranks, then one for the small tensors of any dtype and one for the big one.
        assert out["calls"] == 2 + (size > 1)


def reduces_a_tree() -> None:
    world = started()
    rank, size = world.topology.rank, world.topology.dp_size
    tree = {"loss": torch.tensor(float(rank)), "hits": torch.tensor([rank, 1]), "flag": torch.tensor(rank == 0)}
    total = nested.reduce(tree, "sum")
    assert total["loss"].item() == sum(range(size))
    assert total["loss"].dim() == 0
    assert total["hits"].tolist() == [sum(range(size)), size]
    assert total["flag"].item() == 1
    assert nested.reduce(tree)["hits"].tolist() == [sum(range(size)) / size, 1.0]
    assert nested.reduce(tree, "max")["flag"].item() is True
    assert nested.reduce(tree, "min")["hits"].tolist() == [0, 1]
    assert nested.reduce(tree, "sum", 0.5)["hits"].tolist() == [sum(range(size)) / 2, size / 2]
    own = nested.reduce(tree, "none", 2.0)
    assert own["loss"].item() == 2.0 * rank
    assert tree["loss"].item() == rank, "the argument is unchanged"
    assert tree["hits"].tolist() == [rank, 1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_knows_its_reductions_and_scales(size: int) -> None:
    spawn(reduces_a_tree, size)


def broadcasts_a_tree(source: int) -> list[Any]:
    world = started()
    rank = world.topology.rank
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    tree = {"w": weight, "n": [torch.tensor(rank), None], "view": torch.arange(4)[::2] + rank}
    same = nested.broadcast(tree, from_process=source)
    assert same is tree
    objects = [rank, {"rank": rank}]
    assert nested.broadcast_object_list(objects, from_process=source) is objects
    return [weight.tolist(), tree["n"][0].item(), tree["view"].tolist(), objects]


def test_broadcast_fills_in_place() -> None:
    assert spawn(broadcasts_a_tree, 4, 2) == [[[2.0, 2.0], 2, [2, 4], [2, {"rank": 2}]]] * 4
    assert spawn(broadcasts_a_tree, 1, 0) == [[[0.0, 0.0], 0, [0, 2], [0, {"rank": 0}]]]


def pads_a_tree() -> list[Any]:
    world = started()
    rank = world.topology.rank
    tree = [torch.ones(rank + 1, 2), torch.tensor(5), {"ids": torch.full((2, 3 - rank), rank)}, None]
    first = nested.pad_across_processes(tree, dim=0, pad_index=-1)
    assert first[2]["ids"] is tree[2]["ids"], "nothing to pad"  # type: ignore[index]
    assert first[1].item() == 5
    last = nested.pad_across_processes(tree[2]["ids"], dim=-1, pad_index=9, pad_first=True)  # type: ignore[index]
    both = nested.pad_across_processes(torch.ones(1 + rank, 2 - rank), dim=1)
    assert nested.gather(nested.pad_across_processes(both, dim=0)).sum() == 4, "ragged in two dims, padded in turn"
    return [first[0].tolist(), last.tolist(), nested.gather(first[:2])[0].shape]


def test_pad_across_processes_evens_out_one_dim() -> None:
    low, high = spawn(pads_a_tree, 2)
    assert low == [[[1, 1], [-1, -1]], [[0, 0, 0]] * 2, (4, 2)]
    assert high == [[[1, 1], [1, 1]], [[9, 1, 1]] * 2, (4, 2)]


def gathers_objects() -> list[Any]:
    world = started()
    rank = world.topology.rank
    return [
        nested.gather_object([rank, "a"]),
        nested.gather_object((rank,)),
        nested.gather_object({"ids": [rank]}),
        nested.gather_object("text"),
    ]


def test_gather_object_joins_lists_and_keeps_dicts() -> None:
    assert spawn(gathers_objects, 2) == [[[0, "a", 1, "a"], [0, 1], [{"ids": [0]}, {"ids": [1]}], ["text", "text"]]] * 2
    assert spawn(gathers_objects, 1) == [[[0, "a"], [0], [{"ids": [0]}], ["text"]]]


def disagrees(kind: str) -> str:
    world = started()
    rank = world.topology.rank
    calls = {
        "rows": lambda: nested.gather(torch.ones(rank + 1, 2)),
        "same bytes": lambda: nested.gather(torch.ones((2, 3) if rank else (3, 2))),
        "dtype": lambda: nested.reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32), "sum"),
        "keys": lambda: nested.gather({"b" if rank else "a": torch.ones(1)}),
        "operation": lambda: nested.gather(torch.ones(1)) if rank else nested.reduce(torch.ones(1), "sum"),
        "reduction": lambda: nested.reduce(torch.ones(1), "max" if rank else "min"),
        "source": lambda: nested.broadcast(torch.ones(1), from_process=rank),
        "missing": lambda: nested.gather([torch.ones(1), None if rank else torch.ones(1)]),
        "padded": lambda: nested.pad_across_processes(torch.ones(2, 2)[0] if rank else torch.ones(2, 2)),
        "objects": lambda: nested.gather_object([1] if rank else {"a": 1}),
    }
    try:
        calls[kind]()
    except (CollectiveMismatchError, UsageError) as error:
        # The group is in order: the next collective works.
        assert nested.gather(torch.tensor(rank)).tolist() == [0, 1]
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("rows", "rank 0: gather of float32[1, 2]\n  rank 1: gather of float32[2, 2]"),
        ("same bytes", "rank 0: gather of float32[3, 2]\n  rank 1: gather of float32[2, 3]"),
        ("dtype", "rank 0: reduce sum of float32[2]\n  rank 1: reduce sum of int32[2]"),
        ("keys", "rank 0: gather of {'a': float32[1]}\n  rank 1: gather of {'b': float32[1]}"),
        ("operation", "rank 0: reduce sum of float32[1]\n  rank 1: gather of float32[1]"),
        ("reduction", "rank 0: reduce min of float32[1]\n  rank 1: reduce max of float32[1]"),
        ("source", "rank 0: broadcast from 0 of float32[1]\n  rank 1: broadcast from 1 of float32[1]"),
        ("missing", "rank 0: gather of [float32[1], float32[1]]\n  rank 1: gather of [float32[1], None]"),
        ("padded", "dim 0 of float32[*, *]\n  rank 1: pad_across_processes dim 0 of float32[*]"),
        ("objects", "a list on some ranks and something else on others (rank 0: dict, rank 1: list)"),
    ],
)
def test_ranks_that_disagree_all_raise_and_go_on(kind: str, wanted: str) -> None:
    first, second = spawn(disagrees, 2, kind)
    assert first == second
    assert wanted in first
    assert first.startswith("UsageError" if kind == "objects" else "CollectiveMismatchError")


def refuses() -> None:
    started()
    with pytest.raises(UsageError, match="unknown reduction 'avg'"):
        nested.reduce(torch.ones(1), "avg")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="float is neither a tensor"):
        nested.gather(0.5)
    with pytest.raises(UsageError, match="fills a list in place"):
        nested.broadcast_object_list("text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="process 7 cannot send"):
        nested.broadcast(torch.ones(1), from_process=7)


def test_mistakes_are_refused_whatever_the_world() -> None:
    spawn(refuses, 1)
    spawn(refuses, 2)


def runs_before_anything_is_connected() -> str:
    try:
        nested.gather(torch.ones(1))
    except UsageError as error:
        return str(error)
    return "no error"


def uses_the_scripts_own_group() -> list[int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    out: list[int] = nested.gather(torch.tensor(dist.get_rank())).tolist()
    return out


def test_without_an_accelerator() -> None:
    assert "this is process 1 of 2, and they are not connected yet" in spawn(runs_before_anything_is_connected, 2)[1]
    assert spawn(runs_before_anything_is_connected, 1) == ["no error"]
    assert spawn(uses_the_scripts_own_group, 2) == [[0, 1]] * 2
