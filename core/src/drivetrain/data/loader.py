"""The data loader that ``prepare`` returns: it yields this rank's batches and saves and restores its position."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Never, TypeVar, final
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.backend import Backend
from drivetrain.data.active import ActiveLoaders, BatchInfo, Pass
from drivetrain.data.plan import Position, Rows, from_state, to_state
from drivetrain.data.source import DispatchSource, Item, Source, Start, StatefulSource, clone
from drivetrain.distributed import trees
from drivetrain.errors import UsageError
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.loop.interruption import Interruption


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
    """

    backend: Backend
    config: DataLoaderConfiguration
    base_seed: int
    put_on_device: bool
    active: ActiveLoaders
    rng_types: tuple[str, ...] = ()
    interruption: Interruption | None = None

    @property
    def dp_rank(self) -> int:
        return self.backend.topology.dp_rank

    @property
    def dp_size(self) -> int:
        return self.backend.topology.dp_size


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


logger = get_logger(__name__)


@dataclass
class Cursor:
    """The position of a loader and its views.

    Args:
        seed: of the order.
        position: what was yielded.
        fresh: the next pass begins at ``position``; otherwise a pass has begun there, and the next one begins the next
            epoch.
        restored: ``position`` comes from a checkpoint.
        mark: a stateful loader's own state at ``position``.
        owner: the pass that may move the position; a newer pass takes it over.
        even_batches: as in ``DataLoaderConfiguration``.
    """

    seed: int
    position: Position = field(default_factory=Position)
    fresh: bool = True
    restored: bool = False
    mark: Any = None
    owner: object = None
    even_batches: bool = True


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
        skip: the first pass begins at this batch of the epoch.
    """

    def __init__(
        self,
        loader: Any,
        source: Source,
        context: LoadingContext,
        cursor: Cursor,
        *,
        put_on_device: bool,
        number: int = 0,
        skip: int | None = None,
    ) -> None:
        # DataLoader.__init__ is not called: it would build unused samplers.
        self.base_dataloader = loader
        self._source, self._context, self._cursor = source, context, cursor
        self._shares_out = not source.identity().shares
        self._share_rank = context.dp_rank if self._shares_out else 0
        self._put_on_device, self._skip, self.number = put_on_device, skip, number
        self.ends_loop: bool | None = getattr(loader, "ends_loop", None)
        """Whether a loop that reads several loaders ends where this one ends; ``None`` where that can be told."""
        self.end_of_dataloader = False
        """The batch shown last was the last one of its pass."""

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        this_pass = Pass(self._context.active.next_serial())
        batches = self._batches(this_pass)
        this_pass.iterator = ref(batches)
        return batches

    def _batches(self, this_pass: Pass) -> Generator[Any, None, None]:
        active, cursor = self._context.active, self._cursor
        resumed = cursor.fresh and cursor.restored and cursor.position.consumed > 0
        start, skipped = self._begin(this_pass)
        self.end_of_dataloader = False
        if start.position.finished:
            # Exact resume needs this, but it may surprise a script that counts epochs by steps.
            logger.warning(
                "This pass over a %s is empty: what was restored is the end of epoch %d. The next pass begins the next "
                "epoch; skip_first_batches(loader, 0) begins it at once.",
                type(self.base_dataloader).__name__,
                start.position.epoch,
            )
            self._finish(this_pass)
            return
        self._synchronise_randomness()
        move, full = self._move(), self._nominal_rows()
        nominal = full
        index = start.position.consumed // self._source.round_units if skipped is None else skipped
        items = self._source.open(start)
        interruption = self._context.interruption
        try:
            # A pass draws from torch's generator when it begins. The pass that is resumed has done so before the save.
            with torch.random.fork_rng(devices=[]) if resumed else nullcontext():
                following, following_shown, beyond = self._read(items, move, full)
            while following is not None:
                if interruption is not None and interruption.stepped_in is self:
                    interruption.step_ends()
                item, shown = following, following_shown
                following, following_shown, beyond = self._read(items, move, full)
                is_last = following is None
                if cursor.owner is this_pass:
                    self._advance(item, is_last)
                if item.hidden:
                    continue
                if self.end_of_dataloader is not is_last:
                    # Only on a change: DataLoader checks every attribute that is set.
                    self.end_of_dataloader = is_last
                rows = item.rows if self._shares_out else None
                nominal = _larger(nominal, rows)
                info = BatchInfo(self, rows, index, is_last, active.next_serial(), nominal, beyond)
                active.show(this_pass, info)
                index += 1
                if shown is not None:
                    yield shown()
                else:
                    yield item.batch if move is None else move(item.batch)
            if interruption is not None and interruption.stepped_in is self:
                interruption.step_ends()
            self._finish(this_pass)
        finally:
            active.leave(this_pass)
            items.close()

    def _read(
        self, items: Iterator[Item], move: Callable[[Any], Any] | None, full: int
    ) -> tuple[Item | None, Callable[[], Any] | None, Rows | None]:
        """The next batch, a function that moves it to its device, and the rows of other ranks after the last batch."""
        beyond = None
        for item in items:
            if item.absent:
                beyond = item.rows
            elif item.hidden:
                return item, None, None
            else:
                rows = item.rows
                mine = rows.loaded[self._share_rank]
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
                return size // self._context.dp_size if self._source.round_units == 1 else size
        return 0

    def _begin(self, this_pass: object) -> tuple[Start, int | None]:
        """Decide where a new pass begins; ``(start, skip)``."""
        cursor, source, skip = self._cursor, self._source, self._skip
        self._skip = None
        if not cursor.fresh and skip is None:
            cursor.position, cursor.mark = cursor.position.next_epoch(), None
        discard = 0
        mark = None if cursor.mark is None else (cursor.position.consumed, cursor.mark)
        if skip is not None:
            identity, consumed = source.identity(), skip * source.round_units
            if identity.length is not None:
                consumed = min(consumed, identity.length)
            if cursor.position.finished and consumed < cursor.position.consumed:
                # A script that counts batches is in the next epoch already.
                cursor.position, cursor.mark, mark = cursor.position.next_epoch(), None, None
            elif cursor.restored and cursor.fresh and cursor.position.consumed not in (0, consumed):
                warnings.warn(
                    f"the restored position is {identity.unit[:-1]} {cursor.position.consumed} of the epoch, but "
                    f"skip_first_batches({skip}) begins at {consumed}; leave it out to go on where the checkpoint was "
                    "saved",
                    UserWarning,
                    stacklevel=3,
                )
            if source.num_streams > 1:
                consumed, discard = 0, skip
            cursor.position = Position(cursor.position.epoch, consumed)
        cursor.fresh, cursor.restored, cursor.owner = False, False, this_pass
        return Start(cursor.seed, replace(cursor.position), self.even_batches, discard, mark), skip

    def _advance(self, item: Item, is_last: bool) -> None:
        cursor, source = self._cursor, self._source
        position = cursor.position
        position.consumed += item.rows.units
        # Where ranks may end at different batches, the position alone says that the epoch is at its end.
        position.finished = is_last and (cursor.even_batches or source.cut.drop_last)
        if source.num_streams > 1:
            counts = list(position.streams) or [0] * source.num_streams
            counts[item.stream] += item.rows.units
            position.streams, position.turn = tuple(counts), (item.stream + 1) % source.num_streams
        cursor.mark = item.mark

    def _finish(self, this_pass: object) -> None:
        if self._cursor.owner is this_pass:
            self._cursor.position = self._cursor.position.next_epoch()
            self._cursor.fresh, self._cursor.mark = True, None

    def _synchronise_randomness(self) -> None:
        # The order of samples needs no synchronisation, so "generator" is always true already.
        wanted = [each for each in self._context.rng_types if each != "generator"]
        if wanted and self._context.dp_size > 1:
            from drivetrain.distributed.rng import synchronize_rng_states

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
        """As in ``DataLoaderConfiguration``; a change takes effect with the next pass."""
        return self._cursor.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._cursor.even_batches = value

    def __len__(self) -> int:
        """Batches that this rank yields in a full epoch; for a view from ``skip_first_batches``, in its next pass."""
        length = self._source.length()
        if length is None:
            raise TypeError(f"{type(self.base_dataloader).__name__} has no length: its data says none")
        cut = self._source.cut
        if self._source.round_units == 1:
            batches = length
        else:
            batches = replace(cut, even_batches=self.even_batches).rounds(length, self._share_rank)
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
        length, total = self._source.identity().length, self.total_batch_size
        return -1 if length is None or total is None or self._source.cut.drop_last else length % total

    @property
    def device(self) -> torch.device | None:
        """Where batches are put, ``None`` for nowhere."""
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
        """Choose the epoch of the next pass. The one that a restored position is in keeps the position."""
        cursor = self._cursor
        if epoch != cursor.position.epoch or not cursor.fresh:
            cursor.position, cursor.fresh, cursor.mark, cursor.owner = Position(epoch), True, None, None

    def state_dict(self) -> dict[str, Any]:
        """The global position, JSON-able, the same on every rank and independent of their number.

        Batches that workers have prefetched do not count. Not collective, except for a loader that is marked as
        already sharded and keeps a state of its own: then over the data-parallel ranks.
        """
        cursor = self._cursor
        state = to_state(cursor.position, cursor.seed, self._source.identity())
        if isinstance(self._source, StatefulSource):
            state["loader"] = cursor.mark if self._shares_out else self._context.backend.gather_object(cursor.mark)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a position; the next pass continues from there.

        Raises:
            UsageError: the state is not a loader's, or is of data that is read in another way.
        """
        cursor = self._cursor
        cursor.position, cursor.seed = from_state(state_dict, self._source.identity())
        cursor.fresh, cursor.restored, cursor.owner = True, True, None
        mark = state_dict.get("loader")
        cursor.mark = mark if mark is None or self._shares_out else mark[self._context.dp_rank]

    def remember(self) -> Callable[[], None]:
        """A function that restores this loader's current position. Not collective."""
        cursor, was = self._cursor, dict(vars(self._cursor))
        return lambda: vars(cursor).update(was)

    def skipping(self, num_batches: int) -> PreparedDataLoader:
        """A view whose first pass begins at this batch of the current epoch. See :func:`skip_first_batches`."""
        return PreparedDataLoader(
            self.base_dataloader,
            self._source,
            self._context,
            self._cursor,
            put_on_device=self._put_on_device,
            number=self.number,
            skip=num_batches,
        )


def _larger(nominal: int, rows: Rows | None) -> int:
    """Rows of a full batch: the larger of the two, where the loader does not make the batches."""
    return max(nominal, *rows.loaded) if rows is not None and rows.whole and rows.counted else nominal


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
    """A view of a loader whose next pass begins at batch ``num_batches`` of the current epoch.

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
        raise UsageError(f"cannot skip {num_batches} batches")
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
