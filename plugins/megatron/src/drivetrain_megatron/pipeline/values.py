"""What goes into a model and comes out of it, as a list of leaves and back; and what of it identifies its shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.api import trees

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, type, nn.Module, FunctionType, MethodType)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """``(name, child)`` of a container, in order; ``None`` for a leaf.

    An object of any other class that has tensors among its attributes, as a model may return, is a container too.
    """
    if tree is None or isinstance(tree, (Tensor, *_PLAIN)):
        return None
    inner = trees.children(tree)
    if inner is None and hasattr(tree, "__dict__") and any(_holds_tensors(one) for one in vars(tree).values()):
        return [(f".{name}", child) for name, child in vars(tree).items()]
    return inner


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, Tensor) for one in value)
    return isinstance(value, dict) and any(isinstance(one, Tensor) for one in value.values())


def leaves(tree: Any) -> list[Any]:
    """Everything in a tree that is no container, in order."""
    inner = children(tree)
    if inner is None:
        return [tree]
    return [leaf for _, child in inner for leaf in leaves(child)]


def rebuilt(tree: Any, replacements: Sequence[Any]) -> Any:
    """The tree with other leaves, given in the order of :func:`leaves`."""
    return _rebuilt(tree, iter(replacements))


def _rebuilt(tree: Any, following: Iterator[Any]) -> Any:
    inner = children(tree)
    if inner is None:
        return next(following)
    changed = [_rebuilt(child, following) for _, child in inner]
    if trees.children(tree) is not None:
        return trees.honor_type(tree, changed)
    made = copy.copy(tree)
    vars(made).update({name.removeprefix("."): value for (name, _), value in zip(inner, changed, strict=True)})
    return made


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
    inner = children(tree)
    if inner is None:
        yield tree if isinstance(tree, int | float | str | bool | None) else type(tree)
        return
    yield type(tree)
    for name, child in inner:
        yield name
        yield from _structure(child)
    yield ")"
