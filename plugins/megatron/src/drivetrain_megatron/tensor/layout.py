"""Layouts of sharded tensors: the sharded dim, its packed parts, and the effect of views. Integers only.

A dim of size ``n`` is cut as torch cuts it (``Shard``, :func:`torch.chunk`): rank ``r`` holds the elements from
``r * ceil(n / size)`` on, and the last ranks may hold fewer or none. A *packed* dim consists of several parts one
behind another (queries, keys and values from one linear layer), and each part is cut by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple


class Layout(NamedTuple):
    """Layout of one tensor over the ranks of the axis ``tp``.

    Args:
        shape: of the whole tensor.
        dim: the dim that is cut, not negative; -1 for a tensor that is whole but a sum over ranks is missing.
        parts: sizes of the parts of a packed dim; ``None`` for one part.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Size of the whole dim that is cut."""
        return self.shape[self.dim]

    @property
    def from_right(self) -> int:
        """The dim that is cut, counted from the end: -1 is the last."""
        return self.dim - len(self.shape)

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Start and length in the whole dim of what this rank holds, one for each part, in the order it holds them."""
        return spans(self.parts or (self.length,), rank, size)

    def local_length(self, rank: int, size: int) -> int:
        """Number of elements of the dim on this rank."""
        return sum(length for _, length in self.spans(rank, size))

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        return (*self.shape[: self.dim], self.local_length(rank, size), *self.shape[self.dim + 1 :])

    def longest(self, size: int) -> int:
        """The most elements of the dim that a rank holds."""
        return sum(-(-part // size) for part in self.parts or (self.length,))

    def even(self, size: int) -> bool:
        """Whether every rank holds the same number of elements."""
        return all(part % size == 0 for part in self.parts or (self.length,))


def spans(parts: Sequence[int], rank: int, size: int) -> list[tuple[int, int]]:
    """Start and length of a rank's share of each part, for parts that lie one behind another."""
    found, begin = [], 0
    for part in parts:
        step = -(-part // size)
        start = min(rank * step, part)
        found.append((begin + start, min(step, part - start)))
        begin += part
    return found


class Viewed(NamedTuple):
    """Sharded dim of a view.

    Args:
        dim: the dim of the new shape that is cut.
        parts: its parts.
        divide: a number that the number of ranks must divide for this to hold; 0 when there is no condition.
    """

    dim: int
    parts: tuple[int, ...] | None
    divide: int = 0


def follow_view(layout: Layout, target: Sequence[int]) -> Viewed | None:
    """Follow the cut dim through a view (or a reshape) of the whole tensor.

    Args:
        layout: before.
        target: the new shape, without -1.

    Returns:
        ``None`` when what a rank holds is not a view of that kind.
    """
    before, length = prod(layout.shape[: layout.dim]), layout.length
    passed = 1
    for place, size in enumerate(target):
        if passed == before and size > 1:
            return _begins_here(layout, target, place)
        if passed < before < passed * size:
            # The sharded dim is merged into the dims before it: each of those rows is a part.
            rows, inside = before // passed, size * passed // before
            if layout.parts is not None or inside % length or rows * inside != size:
                return None
            return Viewed(place, (inside,) * rows, length)
        passed *= size
    return None


def _begins_here(layout: Layout, target: Sequence[int], place: int) -> Viewed | None:
    length, size, parts = layout.length, target[place], layout.parts
    if size == length:
        return Viewed(place, parts)
    if size > length:
        inner = size // length
        if size % length:
            return None
        divide = 0 if parts is not None else length
        return Viewed(place, None if parts is None else tuple(part * inner for part in parts), divide)
    if length % size:
        return None
    if parts is None:
        return Viewed(place, None, size)
    if len(set(parts)) > 1 or size != len(parts):
        return None
    rest = layout._replace(shape=(*layout.shape[: layout.dim], size, parts[0], *layout.shape[layout.dim + 1 :]))
    return follow_view(rest._replace(dim=layout.dim + 1, parts=None), target)


def resolved_shape(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """A shape with its -1 filled in, for a tensor of ``count`` elements."""
    known = prod(size for size in shape if size != -1)
    return tuple(count // known if size == -1 and known else size for size in shape)


def part_bounds(layout: Layout) -> list[tuple[int, int]]:
    """Begin and end of each part in the whole dim."""
    found, begin = [], 0
    for part in layout.parts or (layout.length,):
        found.append((begin, begin + part))
        begin += part
    return found


def pieces_of(layout: Layout, sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the parts of each piece of a split along the sharded dim; ``None`` if a piece ends inside a part."""
    parts, found, at = layout.parts or (layout.length,), [], 0
    for size in sizes:
        piece: list[int] = []
        while sum(piece) < size and at < len(parts):
            piece.append(parts[at])
            at += 1
        if sum(piece) != size:
            return None
        found.append(tuple(piece))
    return found if at == len(parts) else None


def refined(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Parts that begin where the layout's do and where pieces of these sizes do, one behind another."""
    ends = {0, *(end for _, end in part_bounds(layout)), *accumulate(sizes)}
    return tuple(after - before for before, after in pairwise(sorted(ends)))


def as_parts(parts: Sequence[int]) -> tuple[int, ...] | None:
    """``None`` for a single part."""
    return tuple(parts) if len(parts) > 1 else None


__all__ = [
    "Layout",
    "Viewed",
    "as_parts",
    "follow_view",
    "part_bounds",
    "pieces_of",
    "refined",
    "resolved_shape",
    "spans",
]
