"""Tracks the prepared loaders that are being iterated: their current batches, and where the loop ends."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple, final
from weakref import ref

from drivetrain.data.plan import Rows


@dataclass(slots=True)
class BatchInfo:
    """The batch that a loader yielded last.

    Args:
        loader: the prepared loader.
        rows: what the global batch holds; ``None`` where only the loader's owner knows (already sharded data).
        index: number of the batch within its epoch as this pass sees it, from 0.
        is_last: no batch follows for this rank.
        serial: changes with every batch that any loader yields.
        nominal_rows: the batch size of one rank, 0 where there is none.
        beyond: what other ranks' batches hold after this, the last one of this rank; ``None`` where they have none.
    """

    loader: Any
    rows: Rows | None
    index: int
    is_last: bool
    serial: int
    nominal_rows: int = 0
    beyond: Rows | None = None

    @property
    def identity(self) -> tuple[int, int, int]:
        """Identifier of the batch, the same on every rank: number of the loader, epoch, index within the epoch."""
        return self.loader.number, self.loader.epoch, self.index


@dataclass(slots=True, eq=False)
class Pass:
    """One iteration of a prepared loader.

    Args:
        created: serial number at which the iteration was created.
        begun: serial of its first batch; 0 before it.
        batch: the batch that it yielded last.
        iterator: what the script iterates.
        partners: loaders (by ``id``) that were seen to advance in the same loop.
    """

    created: int
    begun: int = 0
    batch: BatchInfo | None = None
    iterator: ref[Generator[Any, None, None]] | None = None
    partners: set[int] = field(default_factory=set)


class LoopState(NamedTuple):
    """State of the script's loop when a micro-batch begins.

    Args:
        batch: a number that differs from batch to batch; 0 outside of every loop.
        is_last: the loop ends with this batch.
        rows: what the batch holds, where its rows are what a loss is a mean over; else ``None``.
        unknown: why :attr:`is_last` cannot be known; empty otherwise.
        conflict: why one loss of this batch has no weight; empty otherwise.
        beyond: what other ranks' batches hold after this, the last one of this rank; ``None`` where they have none.
    """

    batch: int = 0
    is_last: bool = False
    rows: Rows | None = None
    unknown: str = ""
    conflict: str = ""
    beyond: Rows | None = None


_OUTSIDE = LoopState()


@final
class ActiveLoaders:
    """The loaders of one accelerator that are inside an iteration; the one that yielded last is the current one.

    A loader is active from its first batch until its iteration ends, is left by ``break`` or is broken by an exception;
    the loader around it is then current again.

    **Several loaders in one loop.** Loaders that yield between the same two micro-batches are read in one loop
    (``zip``, or an iterator that the script keeps and calls ``next`` on). An inner loop is recognised by its
    iteration, which begins anew within each batch of the outer one. The loop ends with the loader that yields first in
    each round, and with those that were begun together with it, as ``zip`` begins them. An iterator that was begun
    earlier, or within the loop, is the script's own: it begins another when one has ended.
    """

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._serial = 0
        self._registered = 0
        self._seen = 0
        """The newest serial when a micro-batch began last."""
        self._together: list[Pass] = []
        """The passes of the loop that this micro-batch is in, in the order in which they yielded."""

    @property
    def current(self) -> BatchInfo | None:
        """The current batch, ``None`` outside of every loop."""
        return self._passes[-1].batch if self._passes else None

    def batch_index(self) -> int | None:
        """Number of the current batch within its epoch, from 0; ``None`` outside of every loop."""
        current = self.current
        return None if current is None else current.index

    def is_last_batch(self) -> bool:
        """Whether the current batch is its loader's last on this rank; ``False`` outside of every loop."""
        current = self.current
        return current is not None and current.is_last

    def state(self) -> LoopState:
        """The state of the loop; called once for each micro-batch."""
        if not self._passes:
            return _OUTSIDE
        if len(self._passes) > 1:
            return self._state_of_several()
        info = _batch(self._passes[0])
        self._seen = info.serial
        return LoopState(info.serial, info.is_last, info.rows, beyond=info.beyond)

    def in_one_loop(self) -> list[BatchInfo]:
        """The current batches of the loaders that are read in one loop, the current one last. Changes nothing."""
        return [_batch(each) for each in _of_innermost_loop(self._passes)]

    def next_serial(self) -> int:
        """A new number for a batch about to be yielded."""
        self._serial += 1
        return self._serial

    def register(self) -> int:
        """Number of a newly prepared loader, so that loaders of one run shuffle independently."""
        self._registered += 1
        return self._registered - 1

    def show(self, one: Pass, info: BatchInfo) -> None:
        """Make this batch, which this iteration has yielded, the current one."""
        one.batch, one.begun = info, one.begun or info.serial
        if not self._passes or self._passes[-1] is not one:
            self.leave(one)
            self._passes.append(one)

    def leave(self, one: Pass) -> None:
        """Remove an iteration that has ended in any way."""
        self._passes = [each for each in self._passes if each is not one]

    def _state_of_several(self) -> LoopState:
        moved = _of_innermost_loop([each for each in self._passes if _batch(each).serial > self._seen])
        if moved:
            moved[0].partners.update(id(_batch(each).loader) for each in moved[1:])
            self._together, self._seen = moved, self._serial
        else:
            moved = [each for each in self._together if each in self._passes] or self._passes[-1:]
        infos = [_batch(each) for each in moved]
        rows, conflict = _rows_of(infos)
        if len(moved) == 1:
            return LoopState(infos[0].serial, infos[0].is_last, rows, beyond=infos[0].beyond)
        is_last, unknown = _ends(moved)
        return LoopState(infos[-1].serial, is_last, rows, unknown, conflict, infos[0].beyond)


def _batch(one: Pass) -> BatchInfo:
    assert one.batch is not None, "a pass without a batch is not active"
    return one.batch


def _of_innermost_loop(passes: Sequence[Pass]) -> list[Pass]:
    """Those of these passes, ordered by when they yielded, that are read in one loop with the last one."""
    if len(passes) < 2:
        return list(passes)
    inner, loader = passes[-1], _batch(passes[-1]).loader
    # An iteration that began within another loader's current batch is an inner loop's, unless it goes on where an
    # iteration of the same loader has ended.
    return [
        each for each in passes if each is inner or inner.created < _batch(each).serial or id(loader) in each.partners
    ]


def _ends(moved: Sequence[Pass]) -> tuple[bool, str]:
    """Whether a loop over several loaders ends here, or why that is unknown."""
    first = moved[0]
    ending = [
        (each, info)
        for each in moved
        if (info := _batch(each)).loader.ends_loop
        or (info.loader.ends_loop is None and (each is first or first.created <= each.created < first.begun))
    ]
    if any(info.is_last and info.loader.ends_loop for _, info in ending):
        return True, ""
    if len({info.is_last for _, info in ending}) > 1:
        # `zip` ends with the first of its iterators, and `cycle` repeats what it has read.
        if any(info.is_last and _held_by(each, zip) for each, info in ending):
            return True, ""
        ending = [(each, info) for each, info in ending if not (info.is_last and _held_by(each, cycle))]
    if len({info.is_last for _, info in ending}) < 2:
        return bool(ending) and ending[0][1].is_last, ""
    infos = [_batch(each) for each in moved]
    read = ", ".join(f"{info.loader.what}{' (at its end)' if info.is_last else ''}" for info in infos)
    return False, f"one loop reads several loaders ({read}), and one ends while another goes on"


def _held_by(one: Pass, kind: type) -> bool:
    """Whether an object of this class holds the iterator. Slow; called only where loaders of one loop end apart."""
    iterator = None if one.iterator is None else one.iterator()
    if iterator is None:
        return False
    holders = gc.get_referrers(iterator)
    holders += [one for holder in holders if type(holder) is tuple for one in gc.get_referrers(holder)]
    return any(type(holder) is kind for holder in holders)


def _rows_of(infos: Sequence[BatchInfo]) -> tuple[Rows | None, str]:
    """The rows that a loss over the batches of one loop is a mean over, or why it has no weight."""
    held = [info.rows for info in infos]
    known = [rows for rows in held if rows is not None]
    if len(known) == len(held) and len({rows.real for rows in known}) == 1:
        return known[-1], ""
    if all(rows.even for rows in known):
        return None, ""
    shares = "; ".join(", ".join(map(str, rows.real)) for rows in known)
    return None, f"the ranks hold different numbers of samples in the batches of the loaders of this loop ({shares})"
