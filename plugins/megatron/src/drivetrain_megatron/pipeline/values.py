"""Flattens and rebuilds nested arguments and outputs of a model, and identifies their shapes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.api.engines import trees

_CONSTANTS = (int, float, complex, str, bytes, torch.dtype, torch.device, type, nn.Module, FunctionType, MethodType)
_LEAVES = (Tensor, *_CONSTANTS)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """``(name, child)`` of a container, in order; ``None`` for a leaf.

    An object of any other class that has tensors among its attributes, as a model may return, is a container too.
    """
    if tree is None or isinstance(tree, _LEAVES):
        return None
    inner = trees.children(tree)
    if inner is None and _has_tensors(tree):
        return [(f".{name}", child) for name, child in vars(tree).items()]
    return inner


def _has_tensors(tree: Any) -> bool:
    """Whether an object of any class has tensors, or a list, tuple or dict of them, among its attributes."""
    for value in vars(tree).values() if hasattr(tree, "__dict__") else ():
        held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(one, Tensor) for one in held):
            return True
    return False


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree in order."""
    found, following = [], [tree]
    while following:
        one = following.pop()
        # Most containers are of these classes, and need no names for what they hold.
        if type(one) is tuple or type(one) is list:
            following.extend(reversed(one))
        elif type(one) is dict:
            following.extend(reversed(one.values()))
        elif one is None or isinstance(one, _LEAVES) or (inner := children(one)) is None:
            found.append(one)
        else:
            following.extend(child for _, child in reversed(inner))
    return found


def rebuilt(tree: Any, replacements: Sequence[Any]) -> Any:
    """The tree with other leaves, given in the order of :func:`leaves`."""
    return _rebuilt(tree, iter(replacements))


def _rebuilt(tree: Any, following: Iterator[Any]) -> Any:
    if tree is None or isinstance(tree, _LEAVES):
        return next(following)
    inner = trees.children(tree)
    if inner is not None:
        return trees.honor_type(tree, [_rebuilt(child, following) for _, child in inner])
    if not _has_tensors(tree):
        return next(following)
    made = copy.copy(tree)
    vars(made).update({name: _rebuilt(child, following) for name, child in vars(tree).items()})
    return made


@dataclass(frozen=True, slots=True)
class Meta:
    """Description of a tensor that a rank receives.

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
        """Describe a tensor, real or fake."""
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
