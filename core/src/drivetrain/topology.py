"""Ranks and mesh axes of a job, as immutable data. Imports no torch.

A job is a grid. Its axes, outermost first, are ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; the last varies
fastest with the global rank, so that ``tp`` stays inside a machine. Ranks that differ only along ``cp`` or ``tp`` or
``pp`` see the same samples; the *data-parallel coordinate* numbers the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from drivetrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the mesh.

    Args:
        name: its key under ``mesh:`` in a configuration.
        splits: what its ranks share out: the layers of a model, samples, the sequence of a sample, or the weights of a
            layer.
        description: one sentence, for configuration files.
    """

    name: str
    splits: Literal["layers", "samples", "sequence", "weights"]
    description: str


GRID = (
    Axis("pp", "layers", "Pipeline stages."),
    Axis("dp_replicate", "samples", "Data-parallel replicas that hold whole parameters."),
    Axis("dp_shard", "samples", "Data-parallel ranks that share the parameters in shards."),
    Axis("cp", "sequence", "Context parallelism: ranks that share one sequence."),
    Axis("tp", "weights", "Tensor parallelism: ranks that share each matrix."),
)
"""Every axis of the mesh, outermost first. A new one is a line here, and the backend that computes along it."""

AXES = tuple(axis.name for axis in GRID)
"""Names of all axes, outermost first."""


def axes_that_split(*what: str) -> tuple[str, ...]:
    """Return the names of the axes that share out one of these (see :class:`Axis`), outermost first."""
    return tuple(axis.name for axis in GRID if axis.splits in what)


DATA_AXES = axes_that_split("samples")
"""The axes along which ranks read different samples."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Ranks of this process in its job, as the launcher assigned them.

    Args:
        rank: global rank, 0 to ``world_size - 1``.
        world_size: number of processes in the job.
        local_rank: rank among the processes of this machine.
        local_world_size: number of processes on this machine.
        node_rank: index of this machine.
        num_nodes: number of machines.
        launcher: ``"none"`` for a plain ``python script.py``, else the launcher's name.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                f"there is no rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}",
                cure="Ranks count from 0 to the size minus one.",
            )


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes; an axis that is not named has size 1.

    ``Mesh({"dp_replicate": 2, "tp": 2})`` is a world of 4. An unknown axis or a size < 1 raises :class:`UsageError`.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sizes) - set(AXES))
        if unknown:
            raise UsageError(f"unknown mesh axis {', '.join(unknown)}", cure=f"The axes are {', '.join(AXES)}.")
        if any(size < 1 for size in self.sizes.values()):
            raise UsageError(
                f"mesh sizes must be at least 1, not {dict(self.sizes)}", cure="Leave an axis out, or write 1."
            )
        object.__setattr__(self, "sizes", {axis: self.sizes.get(axis, 1) for axis in AXES})

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def dp_size(self) -> int:
        """Number of data-parallel coordinates."""
        return math.prod(self.sizes[axis] for axis in DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a global rank along each axis."""
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"rank {rank} is not in a mesh of {self.world_size}", cure=f"Ranks are 0 to {self.world_size - 1}."
            )
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.sizes[axis])
        return {axis: position[axis] for axis in AXES}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Global rank at these coordinates; an axis that is not named counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + coordinates.get(axis, 0)
        return rank

    def dp_rank(self, rank: int) -> int:
        """Data-parallel coordinate of a global rank."""
        position = self.coordinates(rank)
        index = 0
        for axis in DATA_AXES:
            index = index * self.sizes[axis] + position[axis]
        return index

    def peers(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Global ranks, ascending, that agree with ``rank`` on every axis but ``axes``."""
        first = self.rank_at({axis: index for axis, index in self.coordinates(rank).items() if axis not in axes})
        return tuple(first + offset for offset in self._offsets(axes))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The :meth:`peers` of all ranks, each group once, by its first rank. Takes time in proportion to the world."""
        offsets = self._offsets(axes)
        firsts = self._offsets(tuple(axis for axis in AXES if axis not in axes))
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def _offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Global ranks, ascending, of the coordinates that are 0 on every axis but ``axes``."""
        offsets, stride = [0], 1
        for axis in reversed(AXES):
            if axis in axes:
                offsets = [index * stride + offset for index in range(self.sizes[axis]) for offset in offsets]
            stride *= self.sizes[axis]
        return offsets


@dataclass(frozen=True)
class Topology:
    """This process in the running job, as set by :meth:`drivetrain.api.Backend.start`.

    Args:
        process: ranks, as the launcher gave them.
        mesh: sizes of the axes; its product is the world size.
        device: this process's device, e.g. ``"cpu"`` or ``"cuda:1"``.
        communication_backend: gloo, nccl, ... or ``None`` when one process runs alone.
        rank: of this process, the same as ``process.rank``.
        world_size: number of processes, the same as ``process.world_size``.
    """

    process: ProcessInfo
    mesh: Mesh
    device: str
    communication_backend: str | None = None
    rank: int = field(init=False, repr=False, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", self.process.rank)
        object.__setattr__(self, "world_size", self.process.world_size)
        if self.mesh.world_size != self.process.world_size:
            sizes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.sizes.items() if size > 1) or "1"
            raise UsageError(
                f"a mesh of {self.mesh.world_size} ({sizes}) does not fit {self.process.world_size} processes",
                cure="The product of the axis sizes must be the number of processes.",
            )

    @cached_property
    def dp_rank(self) -> int:
        """This process's data-parallel coordinate."""
        return self.mesh.dp_rank(self.process.rank)

    @cached_property
    def dp_size(self) -> int:
        """Number of data-parallel coordinates."""
        return self.mesh.dp_size

    @cached_property
    def dp_ranks(self) -> tuple[int, ...]:
        """Global ranks of the data-parallel group this process is in, by coordinate."""
        return self.mesh.peers(self.process.rank, DATA_AXES)
