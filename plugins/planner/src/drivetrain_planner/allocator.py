"""Simulates torch's caching allocator: what a device hands out for the tensors of a trace, beside what they hold.

An accelerator's allocator takes segments from the device, cuts them into blocks and keeps what is freed, so a process
occupies more than its tensors. The rules are those that PyTorch documents and its ``CUDACachingAllocator.cpp`` follows
where ``PYTORCH_ALLOC_CONF`` says nothing. One stream; a device that is full, for which torch gives cached segments
back, is not simulated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

_ROUND = 512
"""Blocks are multiples of this."""

_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
"""Blocks up to the first are cut from segments of the second."""

_LARGE_SEGMENT, _FROM_OWN = 20 * 2**20, 10 * 2**20
"""Larger blocks are cut from segments of the first, unless they are as large as the second: those get segments of
their own, in multiples of 2 MiB."""


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@final
class CachingAllocator:
    """Segments and blocks of one process on one device."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._count = 0

    def allocate(self, size: int) -> _Block:
        """A block for a tensor of so many bytes."""
        size = -(-max(size, 1) // _ROUND) * _ROUND
        small = size <= _SMALL
        cached = self._free[small]
        place = bisect_left(cached, (size, 0), key=lambda each: each[:2])
        if place < len(cached):
            block = cached.pop(place)[2]
        else:
            own = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
            segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _FROM_OWN else own
            self.reserved += segment
            block = _Block(segment, small)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            left = _Block(rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.size, block.after = size, left
            self._cache(left)
        return block

    def free(self, block: _Block) -> None:
        """Keep a block for later, joined with its free neighbours."""
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._uncache(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._cache(block)

    def _cache(self, block: _Block) -> None:
        block.free = True
        self._count += 1
        insort(self._free[block.small], (block.size, self._count, block), key=lambda each: each[:2])

    def _uncache(self, block: _Block) -> None:
        cached = self._free[block.small]
        place = bisect_left(cached, (block.size, 0), key=lambda each: each[:2])
        while cached[place][2] is not block:
            place += 1
        cached.pop(place)


def reserved(log: Iterable[tuple[int, int]], rounds: int = 2) -> int:
    """Bytes that the allocator takes from the device for a log of tensors, made and freed in this order.

    Args:
        log: number and bytes of each storage that is made, and number and 0 of each that is freed; a number may be used
            again.
        rounds: how often the log is run; the later rounds find what the earlier ones left.
    """
    allocator, kept = CachingAllocator(), list(log)
    for _ in range(rounds):
        blocks: dict[int, _Block] = {}
        for number, size in kept:
            if size:
                blocks[number] = allocator.allocate(size)
            elif number in blocks:
                allocator.free(blocks.pop(number))
        for block in blocks.values():
            allocator.free(block)
    return allocator.reserved
