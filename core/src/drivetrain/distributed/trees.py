"""Traverses, rebuilds, moves and slices nested structures of tensors. Local; the collectives are in ``nested``.

A *tree* is a tensor, or a list, tuple, named tuple, mapping or dataclass of trees. Every function returns a new tree of
the same types (``ModelOutput``, ``defaultdict``, named tuples, ...) and leaves its argument as it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError


def children(node: Any) -> list[tuple[str, Any]] | None:
    """``(name, child)`` of a container, in order; ``None`` for a leaf. The name is as it is written after the node."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def attribute(value: Any, name: str) -> Any:
    """``getattr(value, name, None)`` of an object of unknown type.

    An ``__getattr__`` may raise anything for an unknown name: a model of diffusers raises ``KeyError`` for
    ``__iter__``. An attribute that cannot be read counts as absent.
    """
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - see above
        return None


def honor_type(node: Any, values: Iterable[Any]) -> Any:
    """A container like ``node`` that holds ``values``, given in the order of :func:`children`.

    A subclass of ``dict`` is copied and filled, so that what it carries besides its items is kept.
    """
    if type(node) is dict:
        return dict(zip(node, values, strict=True))
    if isinstance(node, (dict, UserDict)):
        made = copy.copy(node)
        for key, value in zip(list(node), values, strict=True):
            made[key] = value
        return made
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node, values, strict=True)))  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    if isinstance(node, (list, tuple)):
        return type(node)(values)
    made = copy.copy(node)
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        # Works for frozen dataclasses too, as in their own __init__.
        object.__setattr__(made, field.name, value)
    return made


def is_tensor(value: Any) -> bool:
    """The default leaf test of :func:`recursively_apply`."""
    return isinstance(value, Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace every leaf that passes ``test_type`` by ``func(leaf, *args, **kwargs)``.

    Args:
        func: what to apply.
        data: a tree.
        args: further arguments of ``func``.
        test_type: asked before a container is entered, so it may claim containers as leaves too.
        error_on_other_type: raise :class:`UsageError` for another leaf than ``None`` instead of keeping it.
        kwargs: further keyword arguments of ``func``.
    """
    return _apply(lambda leaf: func(leaf, *args, **kwargs), data, test_type, error_on_other_type, "")


def _apply(func: Callable[[Any], Any], node: Any, test: Callable[[Any], bool], strict: bool, path: str) -> Any:
    if test(node):
        return func(node)
    inner = children(node)
    if inner is not None:
        return honor_type(node, [_apply(func, child, test, strict, path + name) for name, child in inner])
    if strict and node is not None:
        raise _no_tensor(node, path)
    return node


def _no_tensor(leaf: Any, path: str) -> UsageError:
    where = f" at {path}" if path else ""
    return UsageError(
        f"{type(leaf).__name__}{where} is neither a tensor nor a list, tuple, dict or dataclass of tensors",
        cure="Make it a tensor, or use gather_object / broadcast_object_list for Python objects.",
    )


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(path, leaf)`` of everything in a tree that is no container, in order; the path is as it is written."""
    inner = children(tree)
    if inner is None:
        yield path, tree
    else:
        for name, child in inner:
            yield from leaves(child, path + name)


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a tree, in order. Raises :class:`UsageError` for another leaf than ``None``."""
    found = []
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif leaf is not None:
            raise _no_tensor(leaf, path)
    return found


def with_tensors(tree: Any, replacements: Sequence[Tensor]) -> Any:
    """The tree with its tensors, in the order of :func:`tensors`, replaced."""
    following: Iterator[Tensor] = iter(replacements)
    return recursively_apply(lambda _: next(following), tree)


def describe(tree: Any, shape: Callable[[Tensor], Sequence[int | str]] = lambda tensor: tensor.shape) -> str:
    """Structure, shapes and dtypes in one line: ``{'x': float32[8, 3], 'y': (int64[8], None)}``."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}[{', '.join(map(str, shape(tree)))}]"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(child, shape)}" for key, child in tree.items()) + "}"
    inner = children(tree)
    if inner is None:
        return "None" if tree is None else type(tree).__name__
    opening, closing = ("[", "]") if isinstance(tree, list) else ("(", ")")
    return opening + ", ".join(describe(child, shape) for _, child in inner) + closing


def find_batch_size(data: Any) -> int:
    """Size of dim 0 of the first tensor that has one.

    Raises:
        UsageError: there is no such tensor.
    """
    for _, leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise UsageError(
        f"no tensor with a batch dimension in {describe(data)}", cure="Pass at least one tensor that has rows."
    )


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Cut every tensor along dim 0; the results share memory with the argument."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of one structure, tensor by tensor.

    Raises:
        UsageError: no trees, other leaves than tensors, or structures that differ.
    """
    if not data:
        raise UsageError("concatenate was given an empty sequence", cure="Pass at least one tensor or structure.")
    columns = [tensors(tree) for tree in data]
    if len({describe(tree, lambda _: "*") for tree in data}) > 1:
        raise UsageError(
            "values of different structure cannot be concatenated: " + "; ".join(map(describe, data)),
            cure="Give all of them the same lists, tuples and keys.",
        )
    return with_tensors(data[0], [torch.cat(parts, dim=dim) for parts in zip(*columns, strict=True)])


def send_to_device(
    tensor: Any,
    device: str | torch.device | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor, and every object with a ``to`` method, to a device.

    Args:
        tensor: a tree; leaves that cannot move are kept.
        device: where to.
        non_blocking: let a copy from pinned memory run beside the host.
        skip_keys: keys of the outermost mappings whose values stay where they are.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if callable(attribute(tensor, "to")) and not isinstance(tensor, type):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:
            # A batch class of the user's, of which only `to(device)` is known.
            return tensor.to(device)
    if isinstance(tensor, Mapping):
        moved = (v if k in skipped else send_to_device(v, device, non_blocking, skipped) for k, v in tensor.items())
        return honor_type(tensor, moved)
    inner = children(tensor)
    if inner is None:
        return tensor
    return honor_type(tensor, [send_to_device(child, device, non_blocking, skipped) for _, child in inner])
