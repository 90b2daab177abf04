"""Checks that each mesh axis a backend lists can be larger than 1 and leaves the numbers as they are.

``drivetrain test`` passes along it, too.
"""

from __future__ import annotations

from drivetrain.cli import self_test
from drivetrain.topology import AXES
from drivetrain_testing import diagnosis
from drivetrain_testing.cases.gradients import compare
from drivetrain_testing.kit import Kit, case
from drivetrain_testing.scenario import Scenario


def _add_case(axis: str) -> None:
    def train_along(kit: Kit) -> None:
        along = kit.along(axis, 2)
        compare(along, Scenario(window=2, max_norm=0.1))
        sizes = along.made[-1].backend.topology.mesh.sizes
        assert sizes[axis] == 2, f"the mesh is {sizes}, although mesh.{axis} is 2"
        with diagnosis.meaning(f"drivetrain test along {axis}"):
            self_test.check(along.accelerator())

    train_along.__name__ = axis
    train_along.__doc__ = f"``mesh: {{{axis}: 2}}`` trains as one process does."
    case(applies=lambda capabilities: axis in capabilities.mesh_axes, world_sizes=(2,))(train_along)


for name in AXES:
    _add_case(name)
