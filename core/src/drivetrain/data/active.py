"""Tracks the prepared loaders that are being iterated: their current batches, and where the loop ends."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, final
from weakref import WeakKeyDictionary, WeakSet, ref

from drivetrain.backend import Backend
from drivetrain.data.plan import Rows, length_of

if TYPE_CHECKING:
    from drivetrain.data.kept_batches import KeptBatches


@dataclass(slots=True, weakref_slot=True, eq=False)
class Pass:
    """One iteration of a prepared loader, and the batch that it yielded last.

    Args:
        loader: the prepared loader.
        created: serial number at which the iteration was created.
        begun: serial of its first batch; 0 before it.
        serial: of its current batch; changes with every batch that any loader yields.
        index: number of that batch within its epoch as this pass sees it, from 0.
        rows: what the global batch holds; ``None`` where only the loader's owner knows (already sharded data).
        is_last: no batch follows for this rank.
        beyond: what other ranks' batches hold after this, the last one of this rank; ``None`` where they have none.
        nominal_rows: the batch size of one rank, 0 where there is none.
        iterator: what the script iterates.
        partners: loaders that were seen to advance in the same loop.
    """

    loader: Any
    created: int
    begun: int = 0
    serial: int = 0
    index: int = 0
    rows: Rows | None = None
    is_last: bool = False
    beyond: Rows | None = None
    nominal_rows: int = 0
    iterator: ref[Generator[Any, None, None]] | None = None
    partners: WeakSet[Any] = field(default_factory=WeakSet)

    @property
    def place(self) -> tuple[int, int, int]:
        """Identifier of the batch, the same on every rank: number of the loader, epoch, index within the epoch."""
        return self.loader.number, self.loader.epoch, self.index


class LoopState(NamedTuple):
    """State of the script's loop when a micro-batch begins.

    Args:
        batch: a number that differs from batch to batch; 0 outside of every loop.
        is_last: the loop ends with this batch.
        rows: rows of the batch, if losses are means over them; else ``None``.
        unknown: why :attr:`is_last` cannot be known; empty otherwise.
        conflict: why one loss of this batch has no weight; empty otherwise.
        beyond: what other ranks' batches hold after this, the last one of this rank; ``None`` where they have none.
        shares: rows of the batches of one loop's loaders, if :attr:`conflict` is set; outside of every loop those of
            uneven batches read before, which the script may have kept.
        after_loops: outside of every loop, where loaders are prepared: a loss may be over a batch that was read before.
    """

    batch: int = 0
    is_last: bool = False
    rows: Rows | None = None
    unknown: str = ""
    conflict: str = ""
    beyond: Rows | None = None
    shares: tuple[Rows, ...] = ()
    after_loops: bool = False


_WITHOUT_LOADERS = LoopState()

_KEPT = 4
"""Kinds of uneven batches that are remembered: a loader ends with one, and evaluation with another."""


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

    Args:
        kept: the uneven batches that the script still holds.
    """

    def __init__(self, kept: KeptBatches) -> None:
        self.kept = kept
        self.record: Any = None
        """The :class:`drivetrain.run_record.RunRecord` of a run that ``drivetrain compare`` has started."""
        self._passes: list[Pass] = []
        self._serial = 0
        self._registered = 0
        self._seen = 0
        """The newest serial when a micro-batch began last."""
        self._together: list[Pass] = []
        """The passes of the loop that this micro-batch is in, in the order in which they yielded."""
        self._uneven: dict[Rows, None] = {}
        """The last uneven batches, each kind once."""
        self._placed = 0
        """The newest serial at the last call of :meth:`place`."""
        self._place: tuple[int, int, int] | None = None

    @property
    def current(self) -> Pass | None:
        """The iteration that yielded last, ``None`` outside of every loop."""
        return self._passes[-1] if self._passes else None

    def batch_index(self) -> int | None:
        """Number of the current batch within its epoch, from 0; ``None`` outside of every loop."""
        return self._passes[-1].index if self._passes else None

    def place(self) -> tuple[int, int, int] | None:
        """The batch that a call is about, the same on every rank: number of its loader, epoch, index in the epoch.

        Of several loaders that have yielded since the last call, the one that was begun first: a rank may look into
        another loader by itself. ``None`` outside of every loop, and where each rank reads data of its own, whose
        length may differ.
        """
        passes = self._passes
        if not passes:
            return None
        one = passes[0]
        if len(passes) > 1:
            moved = [each for each in passes if each.serial > self._placed]
            if not moved:
                return self._place
            one = min(moved, key=_created)
        self._placed = self._serial
        self._place = None if one.rows is None else one.place
        return self._place

    def num_samples(self) -> int:
        """Samples of the data set that the current batch is of; 0 where that is not known. Local."""
        return (length_of(getattr(self._passes[-1].loader, "dataset", None)) or 0) if self._passes else 0

    def is_last_batch(self) -> bool:
        """Whether the current batch is its loader's last on this rank; ``False`` outside of every loop."""
        return bool(self._passes) and self._passes[-1].is_last

    def state(self) -> LoopState:
        """The state of the loop; called once for each micro-batch."""
        if not self._passes:
            # The same on every rank, as what each has read may not be.
            return LoopState(shares=tuple(self._uneven), after_loops=True) if self._registered else _WITHOUT_LOADERS
        if len(self._passes) > 1:
            return self._state_of_several()
        (only,) = self._passes
        self._seen = only.serial
        return LoopState(only.serial, only.is_last, only.rows, beyond=only.beyond)

    def in_one_loop(self) -> list[Pass]:
        """The iterations that advance in one loop, the current one last. Changes nothing."""
        return _of_innermost_loop(self._passes)

    def register(self) -> int:
        """Number of a newly prepared loader, so that loaders of one run shuffle independently."""
        self._registered += 1
        return self._registered - 1

    def begin(self, loader: Any) -> Pass:
        """A new iteration of this loader, which is active from its first batch on."""
        self._serial += 1
        return Pass(loader, self._serial)

    def show(self, one: Pass) -> None:
        """Make the batch that this iteration is about to yield the current one."""
        if self.kept.current:
            self.kept.end()
        self._serial += 1
        one.serial = self._serial
        one.begun = one.begun or one.serial
        if one.rows is not None and not one.rows.even:
            self._uneven.pop(one.rows, None)
            self._uneven[one.rows] = None
            if len(self._uneven) > _KEPT:
                del self._uneven[next(iter(self._uneven))]
        if not self._passes or self._passes[-1] is not one:
            self._passes = [*(each for each in self._passes if each is not one), one]

    def leave(self, one: Pass) -> None:
        """Remove an iteration that has ended in any way."""
        if self.kept.current:
            self.kept.end()
        self._passes = [each for each in self._passes if each is not one]
        self._together = [each for each in self._together if each is not one]

    def _state_of_several(self) -> LoopState:
        moved = _of_innermost_loop([each for each in self._passes if each.serial > self._seen])
        if moved:
            moved[0].partners.update(each.loader for each in moved[1:])
            self._together, self._seen = moved, self._serial
        else:
            moved = self._together or self._passes[-1:]
        rows, conflict = _rows_of(moved)
        shares = tuple(each.rows for each in moved if each.rows is not None) if conflict else ()
        first = moved[0]
        if len(moved) == 1:
            return LoopState(first.serial, first.is_last, rows, beyond=first.beyond)
        is_last, unknown = _ends(moved)
        return LoopState(moved[-1].serial, is_last, rows, unknown, conflict, first.beyond, shares)


def _created(one: Pass) -> int:
    return one.created


_loaders: WeakKeyDictionary[Backend, ActiveLoaders] = WeakKeyDictionary()


def remember_loaders(backend: Backend, active: ActiveLoaders) -> None:
    """Make these the loaders of the script that runs on this backend."""
    _loaders[backend] = active


def loaders_on(backend: Backend) -> ActiveLoaders | None:
    """The loaders of the script that runs on this backend, for functions that are called without an accelerator."""
    return _loaders.get(backend)


def _of_innermost_loop(passes: Sequence[Pass]) -> list[Pass]:
    """Those of these passes, ordered by when they yielded, that are read in one loop with the last one."""
    if len(passes) < 2:
        return list(passes)
    inner = passes[-1]
    # An iteration that began within another loader's current batch is an inner loop's, unless it goes on where an
    # iteration of the same loader has ended.
    return [
        each
        for each in passes
        if each is inner or inner.created < each.serial or inner.loader in each.partners
    ]


def _ends(moved: Sequence[Pass]) -> tuple[bool, str]:
    """Whether a loop over several loaders ends here, or why that is unknown."""
    first = moved[0]
    ending = [
        each
        for each in moved
        if each.loader.ends_loop
        or (each.loader.ends_loop is None and (each is first or first.created <= each.created < first.begun))
    ]
    if any(each.is_last and each.loader.ends_loop for each in ending):
        return True, ""
    if len({each.is_last for each in ending}) > 1:
        # `zip` ends with the first of its iterators, and `cycle` repeats what it has read.
        if any(each.is_last and _held_by(each, zip) for each in ending):
            return True, ""
        ending = [each for each in ending if not (each.is_last and _held_by(each, cycle))]
    if len({each.is_last for each in ending}) < 2:
        return bool(ending) and ending[0].is_last, ""
    read = ", ".join(f"{each.loader.what}{' (at its end)' if each.is_last else ''}" for each in moved)
    return False, f"one loop reads several loaders ({read}), and one ends while another goes on"


def _held_by(one: Pass, kind: type) -> bool:
    """Whether an object of this class holds the iterator. Slow; called only where loaders of one loop end apart."""
    iterator = None if one.iterator is None else one.iterator()
    if iterator is None:
        return False
    holders = gc.get_referrers(iterator)
    # Only types: the list of holders refers to the tuple, too, and would hold itself, and with it the iterator.
    kinds = [type(one) for holder in holders if type(holder) is tuple for one in gc.get_referrers(holder)]
    return kind in kinds or any(type(holder) is kind for holder in holders)


def _rows_of(moved: Sequence[Pass]) -> tuple[Rows | None, str]:
    """The rows that a loss over the batches of one loop is a mean over, or why it has no weight."""
    held = [each.rows for each in moved]
    known = [rows for rows in held if rows is not None]
    if len(known) == len(held) and len({rows.real for rows in known}) == 1:
        return known[-1], ""
    if all(rows.even for rows in known):
        return None, ""
    shares = "; ".join(", ".join(map(str, rows.real)) for rows in known)
    return None, f"the ranks hold different numbers of samples in the batches of the loaders of this loop ({shares})"
