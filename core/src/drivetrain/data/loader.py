"""Implements the data loader that ``prepare`` returns: it yields this rank's batches, and its position can be saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Never, TypeVar, final
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.backend import Backend
from drivetrain.data.active import ActiveLoaders, Pass, remember_loaders
from drivetrain.data.choose_source import make_source
from drivetrain.data.comparison import PassComparison, compare_loaders, describe
from drivetrain.data.dispatch_source import DispatchSource, SliceFunction
from drivetrain.data.drawing import Board, OrderLog, decoded, encoded, make_board
from drivetrain.data.orders import PrivateRandom
from drivetrain.data.plan import Position, Rows, derive_seed
from drivetrain.data.source import Item, Source, clone
from drivetrain.data.stream_sources import StatefulSource
from drivetrain.distributed import trees
from drivetrain.distributed.rank_numbers import seed_of_run
from drivetrain.distributed.rng import synchronize_rng_states
from drivetrain.errors import UsageError
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.loop.interruption import Interruption

logger = get_logger(__name__)

Data = TypeVar("Data")


@dataclass(frozen=True)
class LoadingContext:
    """The settings of a run that loaders use.

    Args:
        backend: started; its topology says which share is this rank's.
        config: how samples are shared out.
        base_seed: the same on every rank; each loader's order is derived from it.
        put_on_device: move batches to the backend's device.
        active: tracks which loader's batch is current.
        rng_types: random states to synchronise at the beginning of each pass, at the cost of a collective; the order of
            samples needs none (``"generator"`` therefore costs nothing).
        interruption: called where a training step has ended; ``None`` when the run does not save on signals.
        board: where ranks agree on what an order follows from; ``None``: one for each loader, by the backend.
    """

    backend: Backend
    config: DataLoaderConfiguration
    base_seed: int
    put_on_device: bool
    active: ActiveLoaders
    rng_types: tuple[str, ...] = ()
    interruption: Interruption | None = None
    board: Board | None = None

    @property
    def dp_rank(self) -> int:
        return self.backend.topology.dp_rank


def already_sharded(data: Data) -> Data:
    """Mark a dataset or a loader whose every rank already yields its own share, so that it is not cut a second time.

    The mark is the attribute ``drivetrain_sharded = True``, which a class may also set for itself. Without it every
    dataset and loader is taken to hold all samples on every rank. (What ``datasets.distributed.split_dataset_by_node``
    returns is recognised without a mark.)

    Returns:
        The same object.

    Raises:
        UsageError: the object takes no attributes.
    """
    try:
        data.drivetrain_sharded = True  # type: ignore[attr-defined]
    except AttributeError as error:
        raise UsageError(
            f"{type(data).__name__} cannot be marked as already sharded",
            cure="Wrap it in a class of your own with the attribute drivetrain_sharded = True.",
        ) from error
    return data


def is_sharded(data: Any) -> bool:
    """Whether this dataset or loader yields only this rank's share."""
    mark = getattr(data, "drivetrain_sharded", None)
    if mark is not None:
        return bool(mark)
    # datasets.IterableDataset keeps rank and world size of split_dataset_by_node here.
    return getattr(getattr(data, "_distributed", None), "world_size", 1) > 1


@dataclass
class Cursor:
    """Position at which the next pass over a loader, or over one of its views, begins.

    Args:
        position: samples or batches yielded so far.
        fresh: the next pass begins at ``position``; otherwise a pass has begun there, and the next one begins the next
            epoch.
        restored: ``position`` comes from a checkpoint.
        owner: the pass that may move the position; a newer pass takes it over. Not kept alive: it refers to the loader.
    """

    position: Position
    fresh: bool = True
    restored: bool = False
    owner: ref[Pass] | None = None

    def is_moved_by(self, one: Pass) -> bool:
        """Whether this pass may move the position."""
        return self.owner is not None and self.owner() is one


FORMAT = 3
"""Numbers the format of a loader's state. In 1 and 2 an order followed from seed and epoch; it goes on as it began."""


@dataclass
class _Opened:
    """A pass that has begun.

    Args:
        start: where it begins.
        skip: number of its first batch in the epoch, where the script has given one.
        items: what the source reads.
        resumed: it goes on with a pass that a checkpoint was saved in.
    """

    start: Position
    skip: int | None
    items: Any
    resumed: bool


_OF_PREPARED = frozenset(
    {
        *("base_dataloader", "number", "ends_loop", "end_of_dataloader"),
        *("_source", "_context", "_cursor", "_shares_out", "_share_rank", "_put_on_device", "_skip"),
    }
)
"""Attributes of a prepared loader; any other is the user's loader's."""

_TAKEN_OVER = frozenset(
    {
        *("dataset", "batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn", "generator", "timeout"),
        *("num_workers", "worker_init_fn", "multiprocessing_context", "persistent_workers", "prefetch_factor"),
        *("pin_memory", "pin_memory_device", "in_order"),
    }
)
"""Attributes of a ``DataLoader`` by which it reads."""


@final
class PreparedDataLoader(DataLoader[Any]):
    """A data loader that distributes its samples over the data-parallel ranks and tracks its position.

    It is a ``DataLoader`` only so that ``isinstance`` says so; the work is done by a source. Attributes that are not
    named here are those of the user's loader.

    **Epochs.** A pass is one ``for`` loop. A pass that ends by itself moves on to the next epoch, so that shuffles
    differ without ``set_epoch``. After a ``break`` the next pass begins the *next* epoch from its start, as a plain
    ``DataLoader`` begins with a new shuffle. After :meth:`load_state_dict` the next pass is the rest of the epoch that
    was saved, empty if its last batch had been shown; after :meth:`set_epoch` it is that epoch.

    Iterating is not collective, except with dispatch or when ``rng_types`` asks for synchronisation.

    Args:
        loader: the user's.
        source: where the batches come from.
        context: the run.
        cursor: where it stands; views of one loader share it.
        put_on_device: move batches to the device.
        number: of the loader in the order of ``prepare``, the same on every rank.
    """

    def __init__(
        self,
        loader: Any,
        source: Source,
        context: LoadingContext,
        cursor: Cursor,
        *,
        put_on_device: bool,
        number: int,
    ) -> None:
        # DataLoader.__init__ is not called: it would build unused samplers.
        self.base_dataloader = loader
        self._source, self._context, self._cursor = source, context, cursor
        self._shares_out = not source.shares
        self._share_rank = context.dp_rank if self._shares_out else 0
        self._put_on_device, self.number = put_on_device, number
        self._skip: int | None = None
        """The next pass begins at this batch of the epoch."""
        self.ends_loop: bool | None = getattr(loader, "ends_loop", None)
        """Whether a loop that reads several loaders ends where this one ends; ``None`` if that is detected."""
        self.end_of_dataloader = False
        """The batch shown last was the last one of its pass."""

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write an attribute of the user's loader there.

        Raises:
            UsageError: it says how the loader reads, and was taken over by ``prepare``.
        """
        if name in _OF_PREPARED or name in PreparedDataLoader.__dict__:
            object.__setattr__(self, name, value)
        elif name in _TAKEN_OVER and isinstance(self.base_dataloader, DataLoader):
            raise UsageError(
                f"{name} of a prepared loader was set, and changes nothing after prepare",
                cure=f"Set it before prepare, or make another loader with this {name} and prepare that.",
            )
        else:
            setattr(self.base_dataloader, name, value)

    def __copy__(self) -> PreparedDataLoader:
        """Another one that reads the same loader and shares its position."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedDataLoader:
        """Copy the loader with its position. The copy is not in checkpoints."""
        made = object.__new__(type(self))
        context = self._context
        memo |= {id(made_once): made_once for made_once in (context, context.backend, context.active)}
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, _protocol: Any) -> Never:
        """Refuse to be pickled.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a prepared loader belongs to its run and cannot be pickled",
            cure="Pickle the loader that you gave to prepare, which is its base_dataloader; its position is "
            "loader.state_dict().",
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        this_pass = self._context.active.begin(self)
        batches = self._batches(this_pass, self._open(this_pass))
        this_pass.iterator = ref(batches)
        return batches

    def _open(self, this_pass: Pass) -> _Opened:
        """Begin a pass, and with it the iteration of torch's loader, whose draws belong here."""
        cursor, source = self._cursor, self._source
        resumed = cursor.fresh and cursor.restored and cursor.position.begun
        skip, discard = self._begin(this_pass)
        position = cursor.position
        if not resumed or position.numbers is None:
            position.numbers = seed_of_run()
        position.order = OrderLog() if position.order is None else position.order.copy()
        position.order.epochs = [] if source.reading is None else source.reading.epochs()
        position.begun = True
        start = replace(position)
        if start.finished:
            source.read_to_end(start)
            return _Opened(start, skip, iter(()), resumed=resumed)
        self._synchronise_randomness()
        # A pass draws from torch's generator when it begins. The pass that is resumed has done so before the save.
        with torch.random.fork_rng(devices=[]) if resumed and source.reading is None else nullcontext():
            items = source.open(start, discard, resumed=resumed)
        return _Opened(start, skip, items, resumed=resumed)

    def _batches(self, this_pass: Pass, opened: _Opened) -> Generator[Any, None, None]:
        active, cursor, source = self._context.active, self._cursor, self._source
        if cursor.owner is None and cursor.fresh:
            # The script has loaded a state, or chosen an epoch, since it called iter().
            opened = self._open(this_pass)
        start, skip, items = opened.start, opened.skip, opened.items
        self.end_of_dataloader = False
        if start.finished:
            self._say_empty(start.epoch)
            self._finish(this_pass)
            return
        move, full = self._move(), self._nominal_rows()
        this_pass.nominal_rows = full
        next_index = start.consumed // source.round_units if skip is None else skip
        interruption = self._context.interruption
        try:
            with torch.random.fork_rng(devices=[]) if opened.resumed and source.reading is None else nullcontext():
                item, shown, _ = self._read(items, move, full)
            while item is not None:
                following: tuple[Item | None, Callable[[], Any] | None] | None = None
                if item.follows is None:
                    ahead, ahead_shown, beyond = self._read(items, move, full)
                    following, is_last = (ahead, ahead_shown), ahead is None
                else:
                    is_last, beyond = not item.follows, item.beyond
                if cursor.is_moved_by(this_pass):
                    self._advance(item, is_last)
                if not item.hidden:
                    if self.end_of_dataloader is not is_last:
                        # Only on a change: DataLoader checks every attribute that is set.
                        self.end_of_dataloader = is_last
                    this_pass.index, this_pass.is_last, this_pass.beyond = next_index, is_last, beyond
                    self._show(this_pass, item.rows)
                    next_index += 1
                    yield self._on_device(item, shown, move)
                    if interruption is not None and interruption.stepped_in == self.number:
                        interruption.step_ends()
                if following is None:
                    # After the script has done with the batch, when torch would read the next.
                    ahead, ahead_shown, _ = self._read(items, move, full)
                    following = ahead, ahead_shown
                    if (ahead is None) is not is_last:
                        self._say_wrong_length(next_index)
                item, shown = following
            self._finish(this_pass)
        finally:
            active.leave(this_pass)
            items.close()

    def _on_device(self, item: Item, shown: Callable[[], Any] | None, move: Callable[[Any], Any] | None) -> Any:
        """Return the batch as the script is given it. It is remembered if ranks share it unevenly."""
        if shown is not None:
            batch = shown()
        else:
            batch = item.batch if move is None else move(item.batch)
        if self._context.active.record is not None:
            self._context.active.record.batch(batch)
        return self._context.active.kept.show(item.rows, batch) if self._shares_out else batch

    def _show(self, this_pass: Pass, rows: Rows) -> None:
        """Make the batch with these rows the current one."""
        if not self._shares_out:
            this_pass.rows = None
        else:
            this_pass.rows = rows
            if rows.whole and rows.counted:
                # The loader does not make the batches.
                this_pass.nominal_rows = max(this_pass.nominal_rows, *rows.loaded)
        self._context.active.show(this_pass)

    def _say_empty(self, epoch: int) -> None:
        """Log that a pass shows nothing. Exact resume needs it, but a script that counts epochs by steps may wonder."""
        logger.warning(
            "This pass over a %s is empty: what was restored is the end of epoch %d. The next pass begins the next "
            "epoch; skip_first_batches(loader, 0) begins it at once.",
            type(self.base_dataloader).__name__,
            epoch,
        )

    def _say_wrong_length(self, shown: int) -> None:
        """Warn that the sampler has not yielded as many samples as its length."""
        source = self._source
        source.trusts_length = False
        warnings.warn(
            f"the sampler of {self.what} says that it has {source.length()} {source.unit}, and ended elsewhere. Batch "
            f"{shown - 1} of this rank was not known to be the last, or was taken for it, and accumulation windows end "
            "with the last. Make its __len__ say what it yields, or leave __len__ out.",
            UserWarning,
            stacklevel=3,
        )

    def _read(
        self, items: Iterator[Item], move: Callable[[Any], Any] | None, full: int
    ) -> tuple[Item | None, Callable[[], Any] | None, Rows | None]:
        """The next batch, a function that moves it to its device, and the rows of other ranks after the last batch."""
        beyond = None
        for item in items:
            rows = item.rows
            mine = rows.loaded[self._share_rank]
            if not mine:
                beyond = rows
            elif item.hidden:
                return item, None, None
            else:
                shown, larger = self._context.backend.place_batch(item.batch, mine, 0 if rows.whole else full, move)
                return item if larger == mine else item._replace(rows=rows.grown(larger)), shown, None
        return None, None, beyond

    def _nominal_rows(self) -> int:
        """Rows of one rank's full batch, 0 where unknown."""
        if self._source.cut.batch_size:
            return self._source.cut.batch_size
        for says in (self.base_dataloader, getattr(self.base_dataloader, "batch_sampler", None)):
            size = getattr(says, "batch_size", None)
            if isinstance(size, int) and not isinstance(size, bool):
                return size // self._source.cut.dp_size if self._source.round_units == 1 else size
        return 0

    def _begin(self, this_pass: Pass) -> tuple[int | None, int]:
        """Move the position to where a new pass begins.

        Returns:
            How many batches of the epoch it skips, ``None`` where it goes on; and how many of them by reading.
        """
        cursor, source, skip, discard = self._cursor, self._source, self._skip, 0
        self._skip = None
        if skip is None:
            if not cursor.fresh:
                cursor.position = cursor.position.at(cursor.position.epoch + 1)
        else:
            position, length, consumed = cursor.position, source.length(), skip * source.round_units
            if length is not None:
                consumed = min(consumed, length)
            epoch, mark, order = position.epoch, position.mark, position.order
            if position.finished and consumed < position.consumed:
                # A script that counts batches is in the next epoch already.
                source.read_to_end(position)
                epoch, mark, order = epoch + 1, None, None
            elif cursor.restored and cursor.fresh and position.consumed not in (0, consumed):
                warnings.warn(
                    f"the restored position is {source.unit[:-1]} {position.consumed} of the epoch, but "
                    f"skip_first_batches({skip}) begins at {consumed}; leave it out to go on where the checkpoint was "
                    "saved",
                    UserWarning,
                    stacklevel=3,
                )
            if source.num_streams > 1:
                consumed, discard = 0, skip
            cursor.position = replace(position.at(epoch, consumed), mark=mark, order=order)
        cursor.fresh, cursor.restored, cursor.owner = False, False, ref(this_pass)
        return skip, discard

    def _advance(self, item: Item, is_last: bool) -> None:
        source, position = self._source, self._cursor.position
        position.consumed += item.rows.units
        # Where ranks may end at different batches, the position alone says that the epoch is at its end.
        position.finished = is_last and (source.cut.even_batches or source.cut.drop_last)
        if source.num_streams > 1:
            counts = list(position.streams) or [0] * source.num_streams
            counts[item.stream] += item.rows.units
            position.streams, position.turn = tuple(counts), (item.stream + 1) % source.num_streams
        position.mark = None if item.mark is None else (position.consumed, item.mark)

    def _finish(self, this_pass: Pass) -> None:
        cursor = self._cursor
        if cursor.is_moved_by(this_pass):
            cursor.position, cursor.fresh = cursor.position.at(cursor.position.epoch + 1), True

    def _synchronise_randomness(self) -> None:
        # The order of samples needs no synchronisation, so "generator" is always true already.
        wanted = [each for each in self._context.rng_types if each != "generator"]
        if wanted and self._context.backend.topology.dp_size > 1:
            synchronize_rng_states(wanted, backend=self._context.backend)

    def _move(self) -> Callable[[Any], Any] | None:
        """The function that copies a batch to the device; ``None`` leaves batches where they are."""
        if not self._put_on_device:
            return None
        device, non_blocking = self._context.backend.topology.device, self._context.config.non_blocking
        if device == "cpu":
            return _keep_on_cpu
        return lambda batch: trees.send_to_device(batch, device, non_blocking)

    @property
    def what(self) -> str:
        """A description for error messages."""
        return f"{type(self.base_dataloader).__name__} number {self.number}"

    @property
    def is_dispatched(self) -> bool:
        """Whether the main process reads every batch and distributes it."""
        return isinstance(self._source, DispatchSource)

    @property
    def even_batches(self) -> bool:
        """Return the setting of ``DataLoaderConfiguration``; a change takes effect with the next pass."""
        return self._source.cut.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._source.cut = replace(self._source.cut, even_batches=value)

    def __len__(self) -> int:
        """Batches that this rank yields in a full epoch; for a view from ``skip_first_batches``, in its next pass."""
        length = self._source.length()
        if length is None:
            raise TypeError(
                f"{type(self.base_dataloader).__name__} has no length, since what it reads has no __len__: count "
                "batches as they come, or give it one"
            )
        whole_batches = self._source.round_units == 1
        batches = length if whole_batches else self._source.cut.rounds(length, self._share_rank)
        return max(batches - (self._skip or 0), 0)

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full global batch; ``None`` where the loader does not make the batches."""
        return self._source.round_units if self._source.cut.batch_size else None

    @property
    def total_dataset_length(self) -> int:
        """Samples in an epoch over all ranks. Raises ``TypeError`` where that is unknown."""
        length = self._source.length()
        return length if length is not None and self._source.cut.batch_size else len(self.base_dataloader.dataset)

    @property
    def remainder(self) -> int:
        """Samples in an incomplete last global batch, 0 if there is none, -1 where it is not known."""
        length, total = self._source.length(), self.total_batch_size
        return -1 if length is None or total is None or self._source.cut.drop_last else length % total

    @property
    def device(self) -> torch.device | None:
        """Device to which batches are moved, or ``None``."""
        return torch.device(self._context.backend.topology.device) if self._put_on_device else None

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """The user's; ``DataLoader`` has a property of this name that looks at the object itself."""
        return self.base_dataloader.multiprocessing_context

    @property
    def epoch(self) -> int:
        """The epoch that the current pass is in, or that the next pass will be in after a complete one."""
        return self._cursor.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The one that a restored position is in keeps the position.

        A ``set_epoch`` of the sampler is called with it, as the script would call it; one of a map-style dataset with
        every pass. An order that torch draws from a generator is the next one that it draws, in whatever epoch: a plain
        ``DataLoader`` knows none. With ``DataLoaderConfiguration(use_seedable_sampler=True)``, or with a ``data_seed``,
        ``shuffle=True`` has the order of that epoch.
        """
        cursor = self._cursor
        if self._source.reading is not None:
            self._source.reading.set_epoch(epoch)
        if epoch != cursor.position.epoch or not cursor.fresh:
            cursor.position, cursor.fresh, cursor.owner = cursor.position.at(epoch), True, None

    def state_dict(self) -> dict[str, Any]:
        """The global position, JSON-able, the same on every rank and independent of their number.

        Batches that workers have prefetched do not count. It holds what the order of the current pass was drawn from,
        and the states of the script's generators that the loader draws from; torch's, numpy's and Python's global
        states are the run's. Not collective, except for a loader that is marked as already sharded and keeps a state of
        its own, or draws an order: then over the data-parallel ranks.
        """
        source, position = self._source, self._cursor.position
        state = {
            "format": 2 if position.legacy else FORMAT,
            "unit": source.unit,
            "seed": position.seed,
            "generator": position.generator,
            "epoch": position.epoch,
            "consumed": position.consumed,
            "finished": position.finished,
            "streams": list(position.streams),
            "turn": position.turn,
            "numbers": position.numbers,
            "begun": position.begun,
            "length": source.length(),
            "shares": source.shares,
        }
        if source.reading is not None and not position.legacy:
            order = position.order if position.begun else None
            drawn = {
                "order": None if order is None or not order.begun else order.to_json(),
                "generators": [encoded(each) for each in source.reading.states()],
            }
            if source.shares > 1 and any(drawn.values()):
                drawn = {"of_ranks": self._context.backend.gather_object(drawn)}
            state |= drawn
            state["sampler_epochs"] = source.reading.epochs() if order is None else order.epochs
        if isinstance(source, StatefulSource):
            mark = None if position.mark is None else position.mark[1]
            state["loader"] = mark if self._shares_out else self._context.backend.gather_object(mark)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a position; the next pass continues from there.

        Generators of the script that the loader draws from get the states that they had.

        Raises:
            UsageError: the state is not a loader's, or is of data that is read in another way.
        """
        cursor, source = self._cursor, self._source
        try:
            if state_dict["format"] not in range(1, FORMAT + 1):
                raise UsageError(
                    f"the loader's state has format {state_dict['format']}, this version reads 1 to {FORMAT}",
                    cure="Upgrade drivetrain, or resume with the version that saved it.",
                )
            position = Position(
                int(state_dict["seed"]),
                state_dict.get("generator"),
                int(state_dict["epoch"]),
                int(state_dict["consumed"]),
                bool(state_dict["finished"]),
                tuple(int(each) for each in state_dict["streams"]),
                int(state_dict["turn"]),
                numbers=state_dict.get("numbers"),
                begun=bool(state_dict.get("begun", state_dict["consumed"])),
                legacy=state_dict["format"] < FORMAT,
            )
            drawn = state_dict["of_ranks"][self._context.dp_rank] if "of_ranks" in state_dict else state_dict
            order = drawn.get("order")
            position.order = None if order is None else OrderLog.from_json(order)
            states = [decoded(each) for each in drawn.get("generators", ())]
            epochs = state_dict.get("sampler_epochs", ())
            unit, shares, length = state_dict["unit"], int(state_dict["shares"]), state_dict["length"]
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"this is not the state of a prepared loader ({type(error).__name__}: {error})",
                cure="Pass what PreparedDataLoader.state_dict() returned.",
            ) from error
        _check_fits(source, position, unit, shares)
        here = source.length()
        if length is not None and here is not None and length != here:
            warnings.warn(
                f"the loader's epoch had {length} {unit} when its position was saved and has {here} now; "
                "the order of a changed dataset is another one, so samples may repeat or be left out",
                UserWarning,
                stacklevel=2,
            )
        mark = state_dict.get("loader")
        if mark is not None:
            position.mark = position.consumed, mark if self._shares_out else mark[self._context.dp_rank]
        reading = source.reading
        if reading is not None and not position.legacy and not reading.restore_states(states):
            warnings.warn(
                f"the position of {self.what} was saved with the states of {len(states)} generator(s) that its samples "
                "are drawn from, and this loader has others: they keep theirs, so later epochs have another order",
                UserWarning,
                stacklevel=2,
            )
        if reading is not None:
            reading.restore_epochs(epochs)
        cursor.position, cursor.fresh, cursor.restored, cursor.owner = position, True, True, None

    def remember(self) -> Callable[[], None]:
        """A function that restores this loader's current position. Not collective."""
        cursor, was, reading = self._cursor, dict(vars(self._cursor)), self._source.reading
        states, epochs = ([], []) if reading is None else (reading.states(), reading.epochs())

        def restore() -> None:
            vars(cursor).update(was)
            if reading is not None:
                reading.restore_states(states)
                reading.restore_epochs(epochs)

        return restore

    def skipping(self, num_batches: int) -> PreparedDataLoader:
        """Return a view whose first pass begins at this batch of the current epoch. See :func:`skip_first_batches`."""
        view = copy.copy(self)
        view._skip, view.end_of_dataloader = num_batches, False  # noqa: SLF001 (of the same class)
        return view


def _shared_out(shares: int) -> str:
    return f"marked as already sharded over {shares} ranks" if shares else "without the mark already_sharded"


def _check_fits(source: Source, position: Position, unit: str, shares: int) -> None:
    """Raise :class:`UsageError` if a saved position does not fit this source; clears streams of another number."""
    if unit != source.unit:
        raise UsageError(
            f"the saved position counts {unit}, this loader counts {source.unit}",
            cure="Resume with the same kind of loader (a batch_sampler of your own, or a batch_size).",
        )
    if shares != source.shares:
        raise UsageError(
            f"the position was saved for a loader {_shared_out(shares)}, and this is one {_shared_out(source.shares)}",
            cure="Resume on the same number of data-parallel ranks, with drivetrain.already_sharded() where it was.",
        )
    streams = len(position.streams) or 1
    if streams != source.num_streams and position.consumed and not position.finished:
        raise UsageError(
            f"the saved position is of {streams} worker stream(s), this loader reads {source.num_streams}",
            cure=f"Resume this iterable dataset with num_workers={streams if streams > 1 else '0 or 1'}.",
        )
    if len(position.streams) != source.num_streams:
        position.streams, position.turn = (), 0


def is_loader(value: Any) -> bool:
    """Whether :func:`prepare_data_loader` takes this: a torch ``DataLoader``, or an iterable that has its own state."""
    if isinstance(value, DataLoader):
        return True
    if isinstance(value, (type, torch.nn.Module)):
        return False
    return all(callable(trees.attribute(value, name)) for name in ("__iter__", "state_dict", "load_state_dict"))


def prepare_data_loader(
    loader: Any,
    context: LoadingContext,
    *,
    put_on_device: bool | None = None,
    slice_fn_for_dispatch: SliceFunction | None = None,
) -> PreparedDataLoader:
    """Distribute a loader's samples over the data-parallel ranks. A prepared loader is returned unchanged.

    Collective over all ranks if the loader has a random generator of the user's (its seed is taken from rank 0), else
    local. Every rank prepares its loaders in the same order.

    Args:
        loader: a ``DataLoader`` with any dataset, sampler, collate function and workers; or any object with
            ``__iter__``, ``state_dict`` and ``load_state_dict``, whose batches the ranks take in turn.
        context: the run.
        put_on_device: move batches to the device; ``None`` = as the context says.
        slice_fn_for_dispatch: ``fn(batch, slice, process_index=, num_processes=)``, one rank's part of a batch that the
            main process has read.

    Raises:
        UsageError: this is no loader, or the settings do not fit it.
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not is_loader(loader):
        raise UsageError(
            f"{type(loader).__name__} is no data loader",
            cure="Pass a torch DataLoader, or an object with __iter__, state_dict and load_state_dict.",
        )
    config, backend, topology = context.config, context.backend, context.backend.topology
    number = context.active.register()
    remember_loaders(backend, context.active)
    sharded = is_sharded(loader) or (isinstance(loader, DataLoader) and is_sharded(loader.dataset))
    shares = topology.dp_size if sharded else 0
    # Also for ranks that compute one batch together: each would read it separately.
    dispatched = bool(config.dispatch_batches) and not shares and topology.world_size > 1
    if slice_fn_for_dispatch is not None and not config.dispatch_batches:
        raise UsageError(
            "slice_fn_for_dispatch is used with dispatch only",
            cure="Set DataLoaderConfiguration(dispatch_batches=True), or leave it out.",
        )
    board = context.board
    if board is None and not dispatched and isinstance(loader, DataLoader):
        board = make_board(backend, sharded=sharded)
    source = make_source(
        loader,
        config,
        1 if shares else topology.dp_size,
        None if dispatched else 0 if shares else topology.dp_rank,
        shares=shares,
        ignores_signals=context.interruption is not None,
        coordinate=(0 if dispatched else topology.dp_rank) if topology.dp_size > 1 or dispatched else None,
        agreement=None if board is None or dispatched else lambda: partial(board.agree, board.key()),
    )
    if topology.world_size > 1 and not shares and not dispatched:
        source.comparison = PassComparison(number, f"{type(loader).__name__} of {_type_of_data(loader)}")
    if dispatched:
        if slice_fn_for_dispatch is not None and not source.cut.batch_size and source.round_units > 1:
            raise UsageError(
                "slice_fn_for_dispatch has nothing to cut: this loader's batches go to the ranks as they are",
                cure="Leave it out, or set split_batches=True with your batch sampler.",
            )
        source = DispatchSource(source, backend, slice_fn_for_dispatch)
    return PreparedDataLoader(
        loader,
        source,
        context,
        Cursor(_first_position(source, context, number)),
        put_on_device=context.put_on_device if put_on_device is None else put_on_device,
        number=number,
    )


def _type_of_data(loader: Any) -> str:
    return type(getattr(loader, "dataset", loader)).__name__


def compare_with_other_ranks(loaders: Iterable[Any], config: DataLoaderConfiguration, backend: Backend) -> None:
    """Compare the loaders that are about to be prepared with those of the other ranks. Collective over all ranks.

    Args:
        loaders: those that are prepared already are left out.
        config: how samples are shared out.
        backend: started.

    Raises:
        UsageError: on every rank: ranks hold parts of the data, or make loaders with different settings.
    """
    new = [loader for loader in loaders if not isinstance(loader, PreparedDataLoader)]
    if new and backend.topology.world_size > 1:
        marks = [is_sharded(each) or is_sharded(getattr(each, "dataset", None)) for each in new]
        with PrivateRandom(0):  # a length may be drawn
            described = [describe(each, config, backend, sharded=mark) for each, mark in zip(new, marks, strict=True)]
        compare_loaders(described, backend)


def _first_position(source: Source, context: LoadingContext, number: int) -> Position:
    """Return the first position, seeded by the user's generator, ``data_seed``, or the run's seed and ``number``."""
    generator = source.generator
    if generator is not None:
        return Position(derive_seed("generator", context.backend.broadcast_object(generator.initial_seed())))
    if context.config.data_seed is not None:
        return Position(derive_seed("data", context.config.data_seed))
    return Position(derive_seed("loader", context.base_seed, number))


def _keep_on_cpu(batch: Any) -> Any:
    """Skip the copy of common batches on the CPU: checking them is cheaper than rebuilding them."""
    values = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
    for value in values:  # a loop, since all() over a generator costs twice as much on each batch
        if type(value) is not torch.Tensor or not value.is_cpu:
            return trees.send_to_device(batch, "cpu")
    return batch


@contextmanager
def even_batches_as(loaders: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Context in which new passes use this setting instead of the loaders' own; ``None`` changes nothing.

    Args:
        loaders: prepared ones.
        even_batches: the setting.
    """
    if even_batches is None:
        yield
        return
    before = [(loader, loader.even_batches) for loader in loaders]
    for loader, _ in before:
        loader.even_batches = even_batches
    try:
        yield
    finally:
        for loader, setting in before:
            loader.even_batches = setting


@final
class SkippedLoader:
    """A plain loader without its first batches, in the first pass only; its other attributes are the loader's own."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.base_dataloader, self._pending = loader, num_batches

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self._pending, 0)

    def __iter__(self) -> Iterator[Any]:
        loader, skip = self.base_dataloader, self._pending
        self._pending = 0
        if not skip:
            yield from loader
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            # Only indices are passed over, no sample is fetched. A second pass needs no persistent workers of this one.
            indices = islice(iter(getattr(loader, name)), skip, None)
            yield from clone(loader, {name: indices, "persistent_workers": False})
        else:
            yield from islice(loader, skip, None)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a view of a loader whose next pass begins at batch ``num_batches`` of the current epoch.

    The number counts from the beginning of the epoch: after ``load_state`` has restored the position behind that batch,
    nothing is skipped twice. Passes after the first show full epochs, and so does the loader itself. A prepared loader
    and its views share one position, so a checkpoint saved while the view is iterated is right.

    Args:
        loader: a prepared loader, or any other iterable.
        num_batches: batches of this rank.

    Raises:
        UsageError: a negative number.
    """
    if num_batches < 0:
        raise UsageError(f"cannot skip {num_batches} batches", cure="Give the number of batches to skip, from 0 on.")
    if isinstance(loader, PreparedDataLoader):
        return loader.skipping(num_batches)
    return SkippedLoader(loader, num_batches)


class _Kind(type):
    """Metaclass of classes that only serve ``isinstance`` checks."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PreparedDataLoader) and instance.is_dispatched == cls._dispatched

    def __call__(cls, *_: Any, **__: Any) -> Never:
        raise UsageError(
            f"a {cls.__name__} is not made by hand",
            cure="Write accelerator.prepare(loader), or accelerator.prepare_data_loader(loader).",
        )

    _dispatched = False


class DataLoaderShard(metaclass=_Kind):
    """A prepared loader of which every rank reads its own share. For ``isinstance``."""


class DataLoaderDispatcher(metaclass=_Kind):
    """A prepared loader that the main process reads for all (``dispatch_batches``). For ``isinstance``."""

    _dispatched = True
