"""Splits a batch into micro-batches: each tensor along its batch dim, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain_megatron.pipeline.values import leaves, rebuilt

Dims = tuple[int | None, ...]
"""Split dim of each leaf of a model's arguments; ``None``: every micro-batch gets the full tensor."""


@dataclass(frozen=True)
class Rows:
    """Partition of the rows of a batch into micro-batches.

    Args:
        bounds: beginning of each micro-batch, and the end of the last.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, size: int, parts: int) -> Rows:
        """Split as evenly as possible; no part is empty."""
        parts = max(min(parts, size), 1)
        return cls(tuple(size * index // parts for index in range(parts + 1)))

    @property
    def size(self) -> int:
        """Rows of the whole batch."""
        return self.bounds[-1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, tensor: Tensor, index: int, rows: int = 1, dim: int = 0) -> Tensor:
        """One micro-batch's part of a tensor that has ``rows`` rows for each of the batch's, one behind another."""
        return tensor.narrow(dim, self.bounds[index] * rows, self.count(index) * rows)

    def spread_part(self, tensor: Tensor, index: int, dim: int = 0) -> Tensor:
        """Likewise for a tensor whose rows repeat periodically, as in a flattened ``[time, batch]``."""
        apart = tensor.unflatten(dim, (-1, self.size))  # type: ignore[no-untyped-call]
        return self.part(apart, index, dim=dim + 1).flatten(dim, dim + 1)

    def count(self, index: int) -> int:
        """Rows of one micro-batch."""
        return self.bounds[index + 1] - self.bounds[index]


def cut(arguments: Any, rows: Rows, dims: Dims) -> list[Any]:
    """The arguments of each micro-batch.

    Args:
        arguments: ``(args, kwargs)`` of the whole batch.
        rows: how its rows are shared out.
        dims: where each leaf has them.
    """
    found = leaves(arguments)
    return [
        rebuilt(
            arguments,
            [leaf if dim is None else rows.part(leaf, index, dim=dim) for leaf, dim in zip(found, dims, strict=True)],
        )
        for index in range(len(rows))
    ]


def chosen(arguments: Any, which: Sequence[int], dims: Dims) -> Any:
    """The arguments of a batch of some of the rows."""
    found = leaves(arguments)
    return rebuilt(
        arguments,
        [
            leaf if dim is None else leaf.index_select(dim, _index(which, leaf))
            for leaf, dim in zip(found, dims, strict=True)
        ],
    )


def _index(which: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(which), device=like.device)
