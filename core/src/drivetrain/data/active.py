"""Keeps track of the prepared loaders that are being iterated: their current batches, and where the loop ends."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from dataclasses import dataclass
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
        dp_rank: this process's data-parallel coordinate.
        index: number of the batch within its epoch as this pass sees it, from 0.
        is_last: no batch follows for this rank.
        serial: changes with every batch that any loader yields.
        nominal_rows: the batch size of one rank, 0 where there is none.
        beyond: what other ranks' batches hold after this, the last one of this rank; ``None`` where they have none.
    """

    loader: Any
    rows: Rows | None
    dp_rank: int
    index: int
    is_last: bool
    serial: int
    nominal_rows: int = 0
    beyond: Rows | None = None

    @property
    def identity(self) -> tuple[int, int, int]:
        """Which batch this is, the same on every rank: number of the loader, epoch, index within the epoch."""
        return self.loader.number, self.loader.epoch, self.index


class Pass:
    """One iteration of a prepared loader, from ``iter(loader)`` on.

    Args:
        created: serial of the moment when the iteration was asked for.
    """

    __slots__ = ("begun", "created", "iterator", "partners")

    def __init__(self, created: int) -> None:
        self.created = created
        self.begun = 0
        """Serial of its first batch; 0 before it."""
        self.iterator: ref[Generator[Any, None, None]] | None = None
        self.partners: set[int] = set()
        """Loaders (by ``id``) that were seen to advance in the same loop."""


class LoopState(NamedTuple):
    """The script's loop when a micro-batch begins.

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
    (``zip``, or an iterator that the script keeps and calls ``next`` on). An inner loop is told from that by its
    iteration, which begins anew within each batch of the outer one. The loop ends with the loader that yields first in
    each round, and with those that were begun together with it, as ``zip`` begins them. An iterator that was begun
    earlier, or within the loop, is the script's own: it begins another when one has ended.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Pass, BatchInfo]] = []
        self._serial = 0
        self._registered = 0
        self._seen = 0
        """The newest serial when a micro-batch began last."""
        self._together: list[Pass] = []
        """The loaders of the loop that this micro-batch is in, in the order in which they yielded."""

    @property
    def current(self) -> BatchInfo | None:
        """The current batch, ``None`` outside of every loop."""
        return self._entries[-1][1] if self._entries else None

    def batch_index(self) -> int | None:
        """Number of the current batch within its epoch, from 0; ``None`` outside of every loop."""
        return self._entries[-1][1].index if self._entries else None

    def is_last_batch(self) -> bool:
        """Whether the current batch is its loader's last on this rank; ``False`` outside of every loop."""
        return bool(self._entries) and self._entries[-1][1].is_last

    def state(self) -> LoopState:
        """Where the loop stands; asked once for each micro-batch."""
        entries = self._entries
        if not entries:
            return _OUTSIDE
        if len(entries) > 1:
            return self._state_of_several()
        info = entries[0][1]
        self._seen = info.serial
        return LoopState(info.serial, info.is_last, info.rows, beyond=info.beyond)

    def next_serial(self) -> int:
        """A new number for a batch about to be yielded."""
        self._serial += 1
        return self._serial

    def register(self) -> int:
        """Number of a newly prepared loader, so that loaders of one run shuffle independently."""
        self._registered += 1
        return self._registered - 1

    def begin(self) -> Pass:
        """A new iteration of some loader; it is active from its first batch on."""
        return Pass(self.next_serial())

    def show(self, token: Pass, info: BatchInfo) -> None:
        """Make this the current batch; ``token`` stands for the iteration it comes from."""
        if not self._entries or self._entries[-1][0] is not token:
            self.leave(token)
            self._entries.append((token, info))
            token.begun = token.begun or info.serial
        else:
            self._entries[-1] = (token, info)

    def leave(self, token: Pass) -> None:
        """The iteration has ended, however."""
        self._entries = [entry for entry in self._entries if entry[0] is not token]

    def in_one_loop(self) -> list[BatchInfo]:
        """The current batches of the loaders that are read in one loop, the current one last. Changes nothing."""
        if len(self._entries) < 2:
            return [info for _, info in self._entries]
        return [info for _, info in _of_innermost_loop(self._entries)]

    def _state_of_several(self) -> LoopState:
        moved = _of_innermost_loop([entry for entry in self._entries if entry[1].serial > self._seen])
        if moved:
            first = moved[0][0]
            first.partners.update(id(info.loader) for _, info in moved[1:])
            self._together, self._seen = [token for token, _ in moved], self._serial
        else:
            moved = self._still_together()
        serial = moved[-1][1].serial
        infos = [info for _, info in moved]
        rows, conflict = _rows_of(infos)
        if len(moved) == 1:
            return LoopState(serial, infos[0].is_last, rows, beyond=infos[0].beyond)
        is_last, unknown = _ends(moved)
        return LoopState(serial, is_last, rows, unknown, conflict, infos[0].beyond)

    def _still_together(self) -> list[tuple[Pass, BatchInfo]]:
        by_pass = dict(self._entries)
        still = [(token, by_pass[token]) for token in self._together if token in by_pass]
        return still or self._entries[-1:]


def _of_innermost_loop(entries: Sequence[tuple[Pass, BatchInfo]]) -> list[tuple[Pass, BatchInfo]]:
    """Of these, in the order in which they yielded, the loaders that are read in one loop with the last one."""
    if len(entries) < 2:
        return list(entries)
    inner, info = entries[-1]
    # An iteration that began within another loader's current batch is an inner loop's, unless it goes on where an
    # iteration of the same loader has ended.
    return [
        entry
        for entry in entries
        if entry[0] is inner or inner.created < entry[1].serial or id(info.loader) in entry[0].partners
    ]


def _ends(moved: Sequence[tuple[Pass, BatchInfo]]) -> tuple[bool, str]:
    """Whether a loop over several loaders ends here, and why that is not known."""
    first = moved[0][0]
    ending = [
        (token, info)
        for token, info in moved
        if info.loader.ends_loop
        or (info.loader.ends_loop is None and (token is first or first.created <= token.created < first.begun))
    ]
    if any(info.is_last and info.loader.ends_loop for _, info in ending):
        return True, ""
    if len({info.is_last for _, info in ending}) > 1:
        # `zip` ends with the first of its iterators, and `cycle` repeats what it has read.
        if any(info.is_last and _held_by(token, zip) for token, info in ending):
            return True, ""
        ending = [entry for entry in ending if not (entry[1].is_last and _held_by(entry[0], cycle))]
    if len({info.is_last for _, info in ending}) < 2:
        return bool(ending) and ending[0][1].is_last, ""
    read = ", ".join(f"{info.loader.what}{' (at its end)' if info.is_last else ''}" for _, info in moved)
    return False, f"one loop reads several loaders ({read}), and one ends while another goes on"


def _held_by(token: Pass, kind: type) -> bool:
    """Whether an object of this class holds the iterator. Slow; asked only where loaders of one loop end apart."""
    iterator = None if token.iterator is None else token.iterator()
    if iterator is None:
        return False
    holders = gc.get_referrers(iterator)
    holders += [one for holder in holders if type(holder) is tuple for one in gc.get_referrers(holder)]
    return any(type(holder) is kind for holder in holders)


def _rows_of(infos: Sequence[BatchInfo]) -> tuple[Rows | None, str]:
    """What a loss over the batches of one loop is a mean over, and why it has no weight."""
    held = [info.rows for info in infos]
    known = [rows for rows in held if rows is not None]
    if len(known) == len(held) and len({rows.real for rows in known}) == 1:
        return known[-1], ""
    if all(rows.even for rows in known):
        return None, ""
    shares = "; ".join(", ".join(map(str, rows.real)) for rows in known)
    return None, f"the ranks hold different numbers of samples in the batches of the loaders of this loop ({shares})"
