"""Work that every rank does for itself grows no faster than the world, and its results are those of the definition."""

from __future__ import annotations

import functools
import itertools
import math
import sys

import pytest

from drivetrain.topology import AXES, DATA_AXES, Mesh

MESHES = [
    Mesh(dict(zip(AXES, sizes, strict=True))) for sizes in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2), (1, 2))
]


def by_definition(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    mine = mesh.coordinates(rank)
    others = ((other, mesh.coordinates(other)) for other in range(mesh.world_size))
    return tuple(other for other, its in others if all(its[axis] == mine[axis] for axis in AXES if axis not in axes))


@pytest.mark.parametrize("axes", [DATA_AXES, ("tp",), ("pp",), ("pp", "tp"), ("cp", "tp"), AXES, ()])
def test_the_groups_of_a_mesh_are_those_of_its_coordinates(axes):
    for mesh in MESHES:
        expected = [by_definition(mesh, rank, axes) for rank in range(mesh.world_size)]
        assert [mesh.peers(rank, axes) for rank in range(mesh.world_size)] == expected
        assert list(mesh.groups(axes)) == sorted(set(expected))


def lines(function) -> int:
    """How many lines of Python a function runs: the same on every machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def exponent(small: int, large: int) -> float:
    return math.log(large / small, 4096 / 512)


def test_the_groups_of_a_mesh_cost_no_more_than_the_world():
    costs = [lines(functools.partial(Mesh({"dp_shard": n // 8, "tp": 8}).groups, DATA_AXES)) for n in (512, 4096)]
    assert exponent(*costs) < 1.05


def test_the_peers_of_a_rank_cost_its_group_alone():
    costs = [lines(functools.partial(Mesh({"dp_shard": n // 8, "tp": 8}).peers, 9, ("tp",))) for n in (512, 4096)]
    assert costs[0] == costs[1]
