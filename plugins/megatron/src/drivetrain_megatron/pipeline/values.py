"""What goes into a model and comes out of it, as a list of leaves and back; and what of it identifies its shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import trees


def leaves(tree: Any) -> list[Any]:
    """Everything in a tree that is no container, in order."""
    inner = trees.children(tree)
    if inner is None or isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, child in inner for leaf in leaves(child)]


def rebuilt(tree: Any, replacements: Sequence[Any]) -> Any:
    """The tree with other leaves, given in the order of :func:`leaves`."""
    return _rebuilt(tree, iter(replacements))


def _rebuilt(tree: Any, following: Iterator[Any]) -> Any:
    inner = trees.children(tree)
    if inner is None or isinstance(tree, Tensor):
        return next(following)
    return trees.honor_type(tree, [_rebuilt(child, following) for _, child in inner])


@dataclass(frozen=True, slots=True)
class Meta:
    """What a rank must know of a tensor to receive it.

    Args:
        shape: its sizes.
        dtype: its dtype.
        trained: a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Of a tensor, real or not."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def signature(tree: Any) -> tuple[Any, ...]:
    """Two inputs of one signature go through a model in the same way: same structure, shapes, dtypes and constants."""
    return tuple(_structure(tree))


def _structure(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Tensor):
        yield (tuple(tree.shape), tree.dtype, tree.requires_grad)
        return
    inner = trees.children(tree)
    if inner is None:
        yield tree if isinstance(tree, int | float | str | bool | None) else type(tree)
        return
    yield type(tree)
    for name, child in inner:
        yield name
        yield from _structure(child)
    yield ")"
