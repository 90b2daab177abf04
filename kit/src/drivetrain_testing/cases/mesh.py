"""Checks that each mesh axis a backend lists can be larger than 1 and leaves the numbers as they are.

``drivetrain test`` passes along it, too.
"""

from __future__ import annotations

from drivetrain.cli import self_test
from drivetrain_testing import diagnosis
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario


def _axis(kit: Kit, axis: str) -> None:
    along = kit.along(axis, 2)
    compare(along, Scenario(window=2, max_norm=0.1))
    sizes = along.made[-1].backend.topology.mesh.sizes
    assert sizes[axis] == 2, f"the mesh is {sizes}, although mesh.{axis} is 2"
    with diagnosis.meaning(f"drivetrain test along {axis}"):
        self_test.check(along.accelerator())


@case(applies=lambda capabilities: "dp_replicate" in capabilities.mesh_axes, world_sizes=(2,))
def dp_replicate(kit: Kit) -> None:
    """``mesh: {dp_replicate: 2}`` trains as one process does."""
    _axis(kit, "dp_replicate")


@case(applies=lambda capabilities: "dp_shard" in capabilities.mesh_axes, world_sizes=(2,))
def dp_shard(kit: Kit) -> None:
    """``mesh: {dp_shard: 2}`` trains as one process does."""
    _axis(kit, "dp_shard")


@case(applies=lambda capabilities: "cp" in capabilities.mesh_axes, world_sizes=(2,))
def cp(kit: Kit) -> None:
    """``mesh: {cp: 2}`` trains as one process does."""
    _axis(kit, "cp")


@case(applies=lambda capabilities: "tp" in capabilities.mesh_axes, world_sizes=(2,))
def tp(kit: Kit) -> None:
    """``mesh: {tp: 2}`` trains as one process does."""
    _axis(kit, "tp")


@case(applies=lambda capabilities: "pp" in capabilities.mesh_axes, world_sizes=(2,))
def pp(kit: Kit) -> None:
    """``mesh: {pp: 2}`` trains as one process does."""
    _axis(kit, "pp")
