"""A batch cut into micro-batches: what has the batch's leading size is cut, all else goes to each of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain.api import UsageError, trees
from drivetrain_megatron.pipeline.values import leaves, rebuilt


@dataclass(frozen=True)
class Rows:
    """How the rows of a batch are shared out.

    Args:
        bounds: beginning of each micro-batch, and the end of the last.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, size: int, parts: int) -> Rows:
        """As evenly as can be; never an empty part."""
        parts = max(min(parts, size), 1)
        return cls(tuple(size * index // parts for index in range(parts + 1)))

    @property
    def size(self) -> int:
        """Rows of the whole batch."""
        return self.bounds[-1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, tensor: Tensor, index: int, rows: int = 1) -> Tensor:
        """One micro-batch's part of a tensor that has ``rows`` rows for each of the batch's."""
        return tensor[self.bounds[index] * rows : self.bounds[index + 1] * rows]

    def count(self, index: int) -> int:
        """Rows of one micro-batch."""
        return self.bounds[index + 1] - self.bounds[index]


def batch_size(arguments: Any) -> int:
    """Leading size of the first tensor.

    Raises:
        UsageError: there is none.
    """
    for leaf in leaves(arguments):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise UsageError(
        "a pipelined model was called without a tensor that has a batch dimension",
        cure="Give it the batch as a tensor argument; its leading size is what is cut into micro-batches.",
    )


def cut(arguments: tuple[tuple[Any, ...], dict[str, Any]], rows: Rows, whole: Collection[str]) -> list[Any]:
    """The arguments of each micro-batch.

    Args:
        arguments: ``(args, kwargs)`` of the whole batch.
        rows: how its rows are shared out.
        whole: keywords whose tensors are not cut, whatever their size.
    """
    args, kwargs = arguments
    return [
        (_part(args, rows, index), {name: v if name in whole else _part(v, rows, index) for name, v in kwargs.items()})
        for index in range(len(rows))
    ]


def _part(tree: Any, rows: Rows, index: int) -> Any:
    found: Sequence[Any] = leaves(tree)
    parts = [
        rows.part(leaf, index) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows.size else leaf
        for leaf in found
    ]
    if trees.children(tree) is None:
        return parts[0]
    return rebuilt(tree, parts)
