"""Rules of operations that move elements: views, transposes, pieces, and tensors put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from drivetrain_megatron.tensor.layout import Layout, as_parts, follow_view, part_bounds, pieces_of, resolved_shape
from drivetrain_megatron.tensor.pointwise import align
from drivetrain_megatron.tensor.sharded import (
    Sharded,
    by_gathering,
    complete,
    global_shape,
    local,
    operation,
    rule,
    settled,
    sharded,
)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "size") -> Any:
    """Sizes given one by one, as a sequence, or by keyword."""
    if kwargs:
        return kwargs.get(name, kwargs.get("shape"))
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, torch.dtype)) else args


def like(found: Tensor, part: Sharded, dim: int, parts: tuple[int, ...] | None) -> Sharded:
    """Wrap a local result that is sharded along ``dim``; the other sizes are those of the full tensor."""
    length = part.spec.length if parts is None else sum(parts)
    shape = (*found.shape[:dim], length, *found.shape[dim + 1 :])
    return sharded(found, Layout(tuple(shape), dim, parts), part.ring, part.owner)


@rule("view", "reshape")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape; the cut dim may be split, merged with what follows it, or become one of several parts."""
    part = args[0]
    sizes = _sizes(args[1:], kwargs)
    if isinstance(sizes, torch.dtype):
        return by_gathering(func, args, kwargs)
    return viewed(func, args, part, _resolved(tuple(sizes), part.spec.shape), kwargs)


@lru_cache(maxsize=4096)
def _resolved(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return resolved_shape(sizes, prod(shape))


@rule("view_as", "reshape_as")
def view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like :func:`view`; one of both may be plain."""
    shape = global_shape(args[1])
    if not isinstance(args[0], Sharded):
        return args[0].reshape(shape)
    return viewed(func, args, args[0], shape, kwargs)


def viewed(func: Any, args: Any, part: Sharded, target: tuple[int, ...], kwargs: dict[str, Any]) -> Any:
    """Return the local view for a full shape."""
    if part.spec.dim < 0:
        partial = local(part).reshape(target)
        return complete(partial, part.ring, part.bias) if len(target) != 2 else _waiting(partial, part)
    spec, shape, divide = local_view(part.spec, target, part.ring.rank, part.ring.size)
    if spec is None or not part.ring.divides(divide, part):
        return by_gathering(func, args, kwargs)
    part_ = local(part)
    made = part_.reshape(shape) if operation(func) in _COPYING else part_.view(shape)
    return sharded(made, spec, part.ring, part.owner)


@lru_cache(maxsize=4096)
def local_view(
    spec: Layout, target: tuple[int, ...], rank: int, size: int
) -> tuple[Layout | None, tuple[int, ...], int]:
    """The layout of a view and the local shape; what must be divisible for that. No layout: not a view of parts."""
    found = follow_view(spec, target)
    if found is None:
        return None, (), 0
    after = Layout(target, found.dim, found.parts)
    return after, after.local_shape(rank, size), found.divide


_COPYING = frozenset({"reshape", "reshape_as", "flatten", "unflatten"})


def _waiting(partial: Tensor, part: Sharded) -> Sharded:
    made = sharded(partial, Layout(tuple(partial.shape), -1), part.ring)
    made.bias = part.bias
    return made


@rule("flatten")
def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Several dims become one."""
    part = args[0]
    shape = part.spec.shape
    start = _argument(args, kwargs, 1, "start_dim", 0) % len(shape)
    end = _argument(args, kwargs, 2, "end_dim", -1) % len(shape)
    target = (*shape[:start], torch.Size(shape[start : end + 1]).numel(), *shape[end + 1 :])
    return viewed(func, args, part, target, kwargs)


@rule("unflatten")
def unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One dim becomes several."""
    part = args[0]
    shape = part.spec.shape
    dim = _argument(args, kwargs, 1, "dim", None) % len(shape)
    sizes = resolved_shape(_argument(args, kwargs, 2, "sizes", None), shape[dim])
    return viewed(func, args, part, (*shape[:dim], *sizes, *shape[dim + 1 :]), kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# Dims in another order. The rule is the operation itself, done to the numbers of the dims.


@rule(
    "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "get:T", "get:mT", "get:H", "get:mH",
    "adjoint", "unsqueeze", "squeeze",
)  # fmt: skip
def reorder(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Permute dims, or add or remove dims of size 1; a probe finds the new place of the sharded dim."""
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    if part.spec.length == 1:
        return by_gathering(func, args, kwargs)
    place = _follow(func, part.spec.shape, part.spec.dim, args[1:], kwargs)
    return like(func(local(part), *args[1:], **kwargs), part, place, part.spec.parts)


_FOLLOWED: dict[Any, int] = {}
_MOST_FOLLOWED = 4096
"""Shapes vary with the batch."""


def _follow(func: Any, shape: tuple[int, ...], dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    key = (
        func,
        shape,
        dim,
        str(args) if kwargs or any(isinstance(each, list) for each in args) else args,
        *kwargs.items(),
    )
    if key not in _FOLLOWED:
        sizes = tuple(1 if size == 1 else 2 for size in shape)
        probe = torch.empty((*sizes[:dim], 3, *sizes[dim + 1 :]), device="meta")
        if len(_FOLLOWED) > _MOST_FOLLOWED:
            _FOLLOWED.clear()
        _FOLLOWED[key] = list(func(probe, *args, **kwargs).shape).index(3)
    return _FOLLOWED[key]


@rule("expand", "expand_as", "broadcast_to")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims of size 1 are repeated; the cut dim keeps its size."""
    if not isinstance(args[0], Sharded):
        return args[0].expand(global_shape(args[1]))
    part = settled(args[0])
    sizes = global_shape(args[1]) if operation(func) == "expand_as" else tuple(_sizes(args[1:], kwargs))
    if not isinstance(part, Sharded):
        return part.expand(sizes)
    place = part.spec.dim + len(sizes) - len(part.spec.shape)
    if part.spec.length == 1:
        return by_gathering(func, args, kwargs)
    return like(local(part).expand(*sizes[:place], -1, *sizes[place + 1 :]), part, place, part.spec.parts)


@rule("repeat")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeats along other dims than the cut one."""
    part, times = args[0], tuple(_sizes(args[1:], kwargs, "repeats"))
    place = part.spec.dim + len(times) - len(part.spec.shape)
    if part.spec.dim < 0 or times[place] != 1:
        return by_gathering(func, args, kwargs)
    return like(local(part).repeat(times), part, place, part.spec.parts)


@rule("repeat_interleave")
def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each element several times: the heads of keys for a group of queries."""
    part = args[0]
    times, dim = _argument(args, kwargs, 1, "repeats", None), _argument(args, kwargs, 2, "dim", None)
    if part.spec.dim < 0 or not isinstance(times, int) or dim is None:
        return by_gathering(func, args, kwargs)
    found = local(part).repeat_interleave(times, dim)
    if dim % len(part.spec.shape) != part.spec.dim:
        return like(found, part, part.spec.dim, part.spec.parts)
    if part.spec.parts is not None or not part.ring.divides(part.spec.length, part):
        return by_gathering(func, args, kwargs)
    shape = (*found.shape[: part.spec.dim], part.spec.length * times, *found.shape[part.spec.dim + 1 :])
    return sharded(found, Layout(tuple(shape), part.spec.dim), part.ring)


# Pieces of a tensor.


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along a dim. Along the cut one, pieces must consist of whole parts."""
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    dim = _argument(args, kwargs, 2, "dim", 0) % len(part.spec.shape)
    if dim != part.spec.dim:
        return tuple(like(one, part, part.spec.dim, part.spec.parts) for one in func(local(part), *args[1:], **kwargs))
    line = func(
        torch.empty(part.spec.length, device="meta"), *args[1:2], **{k: v for k, v in kwargs.items() if k != "dim"}
    )
    sizes = [len(one) for one in line]
    return _pieces(func, args, kwargs, part, sizes)


def _pieces(func: Any, args: Any, kwargs: Any, part: Sharded, sizes: Sequence[int]) -> Any:
    pieces = pieces_of(part.spec, sizes)
    if pieces is None:
        part.ring.wants_parts(part, sizes)
        return by_gathering(func, args, kwargs)
    rank, ranks, dim = part.ring.rank, part.ring.size, part.spec.dim
    specs = [
        Layout((*part.spec.shape[:dim], sum(one), *part.spec.shape[dim + 1 :]), dim, as_parts(one)) for one in pieces
    ]
    lengths = [spec.local_length(rank, ranks) for spec in specs]
    found = local(part).split(lengths, dim)  # type: ignore[no-untyped-call]
    return tuple(sharded(one, spec, part.ring) for one, spec in zip(found, specs, strict=True))


def _along_uncut(
    on_parts: Callable[[Sharded, int], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation along one dim: on this rank's part where another dim is cut, else on the gathered tensor."""
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    dim = _argument(args, kwargs, 1, "dim", 0) % len(part.spec.shape)
    return by_gathering(func, args, kwargs) if dim == part.spec.dim else on_parts(part, dim)


@rule("unbind", "__iter__")
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One tensor for each index of a dim that is not cut."""
    def on_parts(part: Sharded, dim: int) -> Any:
        place = part.spec.dim - (dim < part.spec.dim)
        return tuple(like(one, part, place, part.spec.parts) for one in local(part).unbind(dim))

    return _along_uncut(on_parts, func, args, kwargs)


@rule("select", "narrow", "index_select")
def piece(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A piece along one dim that is not the cut one."""
    def on_parts(part: Sharded, dim: int) -> Any:
        gone = operation(func) == "select" and dim < part.spec.dim
        return like(func(local(part), *args[1:], **kwargs), part, part.spec.dim - gone, part.spec.parts)

    return _along_uncut(on_parts, func, args, kwargs)


@rule("__getitem__")
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index. The cut dim is kept whole, or is sliced into whole parts."""
    part, index = args
    if isinstance(index, Sharded):
        return by_gathering(func, args, kwargs)
    if not isinstance(part, Sharded):
        return func(part, index)
    part = settled(part)
    if not isinstance(part, Sharded):
        return func(part, index)
    given = list(index) if isinstance(index, tuple) else [index]
    items = _without_ellipsis(given, len(part.spec.shape))
    found = None if items is None else _place(items, part.spec.dim)
    if items is None or found is None:
        return by_gathering(func, args, kwargs)
    item, place = found
    if items[item] == slice(None):
        return like(func(local(part), tuple(items)), part, place, part.spec.parts)
    start, stop, step = items[item].indices(part.spec.length)
    if (start, stop, step) == (0, part.spec.length, 1):
        items[item] = slice(None)
        return like(func(local(part), tuple(items)), part, place, part.spec.parts)
    bounds = part_bounds(part.spec)
    inside = [number for number, (begin, end) in enumerate(bounds) if start <= begin and end <= stop]
    covered = sum(bounds[number][1] - bounds[number][0] for number in inside)
    if step != 1 or covered != stop - start:
        if step == 1:
            part.ring.wants_parts(part, [size for size in (start, stop - start, part.spec.length - stop) if size])
        return by_gathering(func, args, kwargs)
    spans = part.spec.spans(part.ring.rank, part.ring.size)
    begin = sum(length for _, length in spans[: inside[0]])
    items[item] = slice(begin, begin + sum(length for _, length in (spans[number] for number in inside)))
    parts = tuple(bounds[number][1] - bounds[number][0] for number in inside)
    made = func(local(part), tuple(items))
    shape = (*made.shape[:place], covered, *made.shape[place + 1 :])
    return sharded(made, Layout(tuple(shape), place, as_parts(parts)), part.ring)


def _without_ellipsis(items: list[Any], dims: int) -> list[Any] | None:
    """The index with an item for each dim; ``None`` for an index that no rule follows."""
    if any(isinstance(item, (list, Sharded)) for item in items):
        return None
    used = sum(_consumes(item) for item in items if item is not None and item is not Ellipsis)
    filling = [slice(None)] * (dims - used)
    at = next((place for place, item in enumerate(items) if item is Ellipsis), None)
    if at is None:
        return [*items, *filling]
    return [*items[:at], *filling, *items[at + 1 :]]


def _consumes(item: Any) -> int:
    return item.dim() if isinstance(item, Tensor) and item.dtype in {torch.bool, torch.uint8} else 1


def _place(items: list[Any], dim: int) -> tuple[int, int] | None:
    """Return the item that indexes the sharded dim, and its dim in the result."""
    if sum(isinstance(item, Tensor) for item in items) > 1 or any(isinstance(item, bool) for item in items):
        return None
    passed = place = 0
    for number, item in enumerate(items):
        if item is None:
            place += 1
            continue
        if isinstance(item, slice) and passed == dim:
            return number, place
        if passed <= dim < passed + _consumes(item):
            return None
        passed += _consumes(item)
        if isinstance(item, Tensor):
            place += 1 if item.dtype in {torch.bool, torch.uint8} else item.dim()
        elif isinstance(item, slice):
            place += 1
    return None


# Tensors put together.


@rule("cat", "concat", "concatenate", "stack")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sharded ones along another dim, or one behind another along the cut one, which makes it packed."""
    tensors = [settled(each) for each in (args[0] if args else kwargs["tensors"])]
    dim = _argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    leading = next((each for each in tensors if isinstance(each, Sharded)), None)
    if leading is None:
        return func(tensors, dim=dim)
    stacks = operation(func) == "stack"
    spec, dims = leading.spec, len(leading.spec.shape)
    dim %= dims + stacks
    if not stacks and dim == spec.dim:
        return _one_behind_another(func, tensors, dim)
    # A tensor without elements is skipped by torch too: caches begin with one.
    tensors = [each for each in tensors if isinstance(each, Sharded) or each.numel() or stacks]
    locals_ = [align(each, leading, spec.from_right) for each in tensors]
    return like(func(locals_, dim=dim), leading, spec.dim + (stacks and dim <= spec.dim), spec.parts)


def _one_behind_another(func: Any, tensors: list[Any], dim: int) -> Any:
    alike = all(isinstance(each, Sharded) and each.spec.dim == dim for each in tensors)
    if not alike:
        return by_gathering(func, (tensors,), {"dim": dim})
    parts = [part for each in tensors for part in (each.spec.parts or (each.spec.length,))]
    return like(func([local(each) for each in tensors], dim=dim), tensors[0], dim, tuple(parts))
