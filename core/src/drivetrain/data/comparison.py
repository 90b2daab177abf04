"""Compares the data of all ranks: loaders in ``prepare``, samples in a first pass, inputs of a first forward.

A prepared loader shards its samples over ranks, so every rank must hold all of them. A ``Subset``, a sampler or a
stream that already yields this rank's part would be sharded a second time, and samples would be skipped. Properties
that need no samples are compared in ``prepare`` (:func:`compare_loaders`). Orders of samplers and the first
samples of streams are compared in the first pass, beside the training (:class:`PassComparison`). So are the inputs of a
model's first forward: the same on all ranks where a loader was not prepared, or normalised over the rows of each rank
(:class:`FirstInputs`).
"""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from drivetrain.backend import Backend
from drivetrain.data.active import loaders_on
from drivetrain.data.plan import length_of
from drivetrain.data.standardised import is_readable, is_standardised
from drivetrain.distributed import trees
from drivetrain.distributed.call_monitor import Current
from drivetrain.distributed.collectives import Ranks
from drivetrain.errors import UsageError
from drivetrain.kwargs import DataLoaderConfiguration
from drivetrain.launch.failures import script_line
from drivetrain.logging import get_logger
from drivetrain.wording import listed

logger = get_logger(__name__)

PARTS_CURE = (
    "Where each rank is meant to read its own part, mark it: accelerator.prepare(drivetrain.already_sharded(loader)). "
    "Otherwise give every rank all samples in the same order: leave out the Subset, sampler or slice that takes a "
    "rank's part, and draw splits, orders and made-up data from one seed on every rank."
)
SEED_CURE = (
    "Where samples are made up or drawn at random, write drivetrain.utils.set_seed(0) before the data set is made, on "
    "every rank. Where each rank is meant to read its own part, mark it: "
    "accelerator.prepare(drivetrain.already_sharded(loader))."
)
"""For samples of which all ranks have as many, whose values differ."""

SETTINGS_CURE = "Make the loader with the same settings on every rank; batch_size is that of one rank."

NUM_SAMPLES = 64
"""Number of compared samples of a list or tensor, evenly spaced: enough to distinguish shards from the full data."""

_MAX_ELEMENTS = 4096
"""Elements of one tensor that are compared."""

_MAX_DEPTH = 6
"""Limits how deep data sets inside data sets, and samples inside samples, are described."""


# ---- digests ---------------------------------------------------------------------------------------------------------


@final
class Content:
    """Digests of values, with separate ones for floating-point numbers, the only ones that augmentations change.

    Attributes:
        exact, floats: of all that was added; they depend on the order.
        num_exact, num_floats: how many leaves of each kind were added. Others, such as images of PIL, are not read.
        varies: the exact leaves are not all the same.
    """

    def __init__(self, *values: Any) -> None:
        self.exact = self.floats = self.num_exact = self.num_floats = 0
        self.varies = False
        self._first: bytes | None = None
        for value in values:
            self.add(value)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value: a number, text, path, tensor, array, or a container of such."""
        if isinstance(value, (str, bytes, int, PurePath)) or value is None:
            self._add_exact(repr(value).encode(errors="backslashreplace"))
        elif isinstance(value, float):
            self._add_floats(repr(value).encode())
        elif isinstance(value, Tensor):
            self._add_array(_part_of_tensor(value))
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(_part_of_array(np.asarray(value)))
        elif depth < _MAX_DEPTH and (inner := trees.children(value)) is not None:
            for _, child in inner[:NUM_SAMPLES]:
                self.add(child, depth + 1)

    def _add_array(self, part: np.ndarray | None) -> None:
        if part is None:
            return
        if part.dtype.kind in "fcV":
            self._add_floats(part.tobytes())
        elif part.dtype.kind == "O":
            self._add_exact(repr(part.tolist()).encode(errors="backslashreplace"))
        else:
            self._add_exact(part.tobytes())

    def _add_exact(self, data: bytes) -> None:
        self.exact, self.num_exact = zlib.crc32(data, self.exact), self.num_exact + 1
        if self._first is None:
            self._first = data
        self.varies = self.varies or data != self._first

    def _add_floats(self, data: bytes) -> None:
        self.floats, self.num_floats = zlib.crc32(data, self.floats), self.num_floats + 1

    @property
    def digest(self) -> int | None:
        """Digests all that was added; ``None`` where nothing was read."""
        return hash((self.exact, self.floats)) if self.num_exact or self.num_floats else None

    @property
    def of_samples(self) -> int | None:
        """Digest that identifies the samples: of the exact leaves if they differ from one another, else of all."""
        return hash(self.exact) if self.varies else self.digest


def _rows(size: int) -> list[int]:
    """At most :data:`NUM_SAMPLES` numbers below ``size``, evenly spaced, the first and the last among them."""
    if size <= NUM_SAMPLES:
        return list(range(size))
    return [index * (size - 1) // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)]


def _part_of_tensor(tensor: Tensor) -> np.ndarray | None:
    """Elements of a plain tensor as an array on the host; ``None`` where reading it is not plain or not cheap."""
    if not is_readable(tensor):
        return None
    part = tensor.detach()
    if part.dim() and part.shape[0] > NUM_SAMPLES:
        part = part[torch.tensor(_rows(part.shape[0]), device=part.device)]
    part = part.reshape(-1)
    if part.numel() > _MAX_ELEMENTS:
        part = part[:: part.numel() // _MAX_ELEMENTS]
    if part.dtype in (torch.bfloat16, torch.float16) or (part.element_size() == 1 and part.is_floating_point()):
        part = part.float()
    return part.cpu().resolve_conj().resolve_neg().numpy()


def _part_of_array(array: np.ndarray) -> np.ndarray:
    part = (array[_rows(len(array))] if array.ndim else array).reshape(-1)
    return part[:: len(part) // _MAX_ELEMENTS] if len(part) > _MAX_ELEMENTS else part


def _digest_of_indices(indices: Any) -> int | None:
    """Digest all indices: parts may differ in a few. ``None`` for a sequence of the script's own, which may draw."""
    if isinstance(indices, Tensor):
        indices = indices.detach().cpu().numpy()
    if not isinstance(indices, (list, tuple, range, np.ndarray)):
        return None
    return zlib.crc32(np.asarray(indices).tobytes())


def _beginning(units: Iterable[Any]) -> str:
    shown = [str(each.tolist() if hasattr(each, "tolist") else each) for each in islice(units, 4)]
    return ", ".join(each if len(each) < 40 else f"{each[:36]} ..." for each in shown)


# ---- what is given to prepare ----------------------------------------------------------------------------------------


class Container(NamedTuple):
    """Describes what a data set holds its samples in.

    Args:
        owner: the data set, ``TensorDataset``.
        name: of the attribute or position.
        whole_numbers: it holds nothing but these, as labels and token ids are.
        digest: of a few samples.
    """

    owner: str
    name: str
    whole_numbers: bool
    digest: int


@dataclass
class Description:
    """A loader that a rank gives to ``prepare``, as far as it can be known without reading samples.

    Args:
        what: for messages.
        coordinate: data-parallel coordinate where the loader is marked as this rank's part; ``None``: it is shared out.
        length: of the data set, ``None`` where it has none.
        settings: by name; they must be the same on all ranks.
        parts: by name, a digest and text; they differ where a rank's part was taken already.
        containers: of samples.
        seed: of the script's generator, of which that of rank 0 is used.
        dispatched: the main process reads it for all ranks.
        numbers: whole numbers that a stream holds, by the names of its attributes.
        described: its data could be looked at.
    """

    what: str
    coordinate: int | None
    length: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, tuple[Any, str]] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    seed: int | None = None
    dispatched: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    described: bool = True

    def add_data(self, data: Any, name: str = "", depth: int = 0) -> None:
        """Describe a data set, and those inside it. Reads the samples of lists and tensors only."""
        if depth > _MAX_DEPTH:
            return
        kind = type(data).__name__
        where = f"{name}{kind}"
        self.settings[f"class of the data set {name}".rstrip(" .")] = kind
        if isinstance(data, Subset):
            self.parts[f"{where}.indices"] = _digest_of_indices(data.indices), f"indices {_beginning(data.indices)}"
            self.add_data(data.dataset, f"{where}.", depth + 1)
        elif isinstance(data, ConcatDataset):
            for index, each in enumerate(data.datasets[:NUM_SAMPLES]):
                self.add_data(each, f"{where}[{index}].", depth + 1)
        elif isinstance(data, TensorDataset):
            for index, tensor in enumerate(data.tensors):
                self._add_container(where, f"tensors[{index}]", tensor)
        elif isinstance(data, (list, tuple, np.ndarray, Tensor)):
            self._add_container(where, "", data)
        elif isinstance(data, range):
            self.parts[where] = repr(data), repr(data)
        elif _is_arrow(data):
            self._add_container(where, "", _arrow_rows(data))
        elif isinstance(data, IterableDataset):
            self.numbers |= {f"{where}.{name}": each for name, each in vars(data).items() if type(each) is int}
        elif hasattr(data, "__dict__"):
            self._add_attributes(data, where, depth)

    def _add_attributes(self, data: Any, where: str, depth: int) -> None:
        """Describe what an object of the script's own class holds: data sets, and something for each sample."""
        length = length_of(data)
        for name, value in vars(data).items():
            if isinstance(value, Dataset) or _is_arrow(value):
                self.add_data(value, f"{where}.{name}.", depth + 1)
            elif length and _is_container(value) and len(value) == length:
                self._add_container(where, name, value)

    def _add_container(self, owner: str, name: str, values: Any) -> None:
        content = Content()
        if isinstance(values, (Tensor, np.ndarray)):
            content.add(values)
        elif hasattr(values, "iloc"):
            content.add(values.iloc[_rows(len(values))].to_numpy())
        else:
            for index in _rows(len(values)):
                content.add(values[index])
        if content.digest is not None:
            self.containers.append(Container(owner, name, _are_whole_numbers(values), content.digest))

    def add_sampler(self, sampler: Any, dataset: Any) -> None:
        """Describe a sampler of torch's. One of the script's own is skipped: it may draw random numbers when read."""
        kind = type(sampler).__name__
        self.settings["class of the sampler"] = kind
        if type(sampler) is BatchSampler:
            self.settings |= {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last}
            self.add_sampler(sampler.sampler, dataset)
        elif type(sampler) is RandomSampler:
            self.settings |= {"num_samples": sampler.num_samples, "replacement": sampler.replacement}
        elif type(sampler) is SubsetRandomSampler:
            text = f"indices {_beginning(sampler.indices)}"
            self.parts[f"{kind}.indices"] = _digest_of_indices(sampler.indices), text
        elif type(sampler) is WeightedRandomSampler:
            self.settings |= {"num_samples": sampler.num_samples, "replacement": sampler.replacement}
            text = f"weights {_beginning(sampler.weights)}"
            self.parts[f"{kind}.weights"] = _digest_of_indices(sampler.weights), text
        elif isinstance(sampler, DistributedSampler):
            self.settings |= {"seed of the sampler": sampler.seed, "shuffle of the sampler": sampler.shuffle}
            if type(sampler) is not DistributedSampler:
                # torch's own is replaced; a subclass is iterated.
                self.parts[kind] = sampler.rank, f"{kind} of rank {sampler.rank}"
        for held in (getattr(sampler, "data_source", None), getattr(sampler, "dataset", None)):
            if isinstance(held, Subset) and held is not dataset:
                self.add_data(held, "sampler.")


def _is_container(value: Any) -> bool:
    if isinstance(value, np.ndarray) or type(value) is Tensor:
        return value.ndim > 0
    return isinstance(value, (list, tuple)) or _is_frame(value)


def _is_frame(value: Any) -> bool:
    """Whether it is a table or column of pandas, which is not imported for this."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series))


def _is_arrow(data: Any) -> bool:
    """Whether it is a table of ``datasets``, which is not imported for this."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


def _arrow_rows(data: Any) -> list[str]:
    """Rows of a ``datasets.Dataset`` as they are stored: decoding takes time, and transforms may draw."""
    plain = data.with_format("arrow")
    return [str(plain[index].to_pydict()) for index in _rows(len(plain))]


def _are_whole_numbers(values: Any) -> bool:
    if isinstance(values, Tensor):
        return not values.is_floating_point()
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "iub"
    return isinstance(values, (list, tuple)) and all(isinstance(values[index], int) for index in _rows(len(values)))


def describe(loader: Any, config: DataLoaderConfiguration, backend: Backend, *, sharded: bool) -> Description:
    """Describe a loader that is about to be prepared. Draws no random number and reads no sample of the script's own.

    Args:
        loader: a ``DataLoader``, or an object with a state of its own.
        config: how samples are shared out.
        backend: of this process.
        sharded: it is marked as this rank's part.
    """
    kind = type(loader).__name__
    topology = backend.topology
    if not isinstance(loader, DataLoader):
        length = None if sharded else length_of(loader)
        return Description(kind, topology.dp_rank if sharded else None, length, {"class": kind})
    dataset: Any = loader.dataset
    found = Description(f"{kind} of {type(dataset).__name__}", topology.dp_rank if sharded else None)
    if config.dispatch_batches and not sharded:
        # Compared for a warning alone: the main process reads for all, and what others hold is not used.
        found.dispatched = True
        try:
            found.add_sampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, dataset)
            found.add_data(dataset)
        except Exception:
            # What the main process reads for all may be missing on the others, or take no questions.
            logger.debug("%s is not compared: it cannot be described on this rank.", found.what, exc_info=True)
            found.described = False
        return found
    found.length = length_of(dataset)
    found.settings = {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "split_batches": config.split_batches,
        "even_batches": config.even_batches,
        "data_seed": config.data_seed,
    }
    if isinstance(dataset, IterableDataset):
        # A script may give more workers to one rank of map-style data, but each worker reads a stream of its own.
        found.settings["num_workers"] = max(loader.num_workers, 1)
    else:
        found.add_sampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, dataset)
    found.add_data(dataset)
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    found.seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
    return found


def compare_loaders(descriptions: Sequence[Description], backend: Backend) -> None:
    """Compare the loaders that are about to be prepared, before anything is changed.

    Collective over all ranks, one exchange.

    Args:
        descriptions: of this rank's loaders, in their order.
        backend: of this process.

    Raises:
        UsageError: on every rank: ranks hold parts of the data, or make loaders with different settings.
    """
    if backend.topology.world_size == 1:
        return
    everyones = Ranks(backend).gather(list(descriptions))
    numbers = [len(each) for each in everyones]
    if len(set(numbers)) > 1:
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        raise UsageError(
            f"ranks prepare different numbers of loaders: {numbers[0]} on rank 0, {numbers[other]} on rank {other}",
            cure="Call prepare with the same loaders on every rank, also where a rank will not read one.",
        )
    for index in range(numbers[0]):
        here = {rank: each[index] for rank, each in enumerate(everyones)}
        marked = {rank for rank, each in here.items() if each.coordinate is not None}
        if marked and len(marked) < len(here):
            raise UsageError(
                f"loader {index} of this call is marked as already sharded on ranks {listed(map(str, sorted(marked)))} "
                "alone",
                cure="Write drivetrain.already_sharded(...) on every rank or on none.",
            )
        for coordinate in {each.coordinate for each in here.values()}:
            _compare(index, {rank: each for rank, each in here.items() if each.coordinate == coordinate})


def _compare(index: int, ranks: dict[int, Description]) -> None:
    """Raise where ranks that must hold the same data do not."""
    one = next(iter(ranks.values()))
    if one.dispatched:
        _say_unread(index, ranks)
        return
    empty = {rank for rank, each in ranks.items() if each.length == 0}
    if empty and len(empty) < len(ranks):
        filled = {rank: each for rank, each in ranks.items() if rank not in empty}
        if len({each.length for each in filled.values()}) == 1:
            logger.warning(
                "Loader %d of this prepare (%s) is empty on ranks %s. The others read their shares of it alone, and do "
                "not see the rest: give every rank all samples, or mark it with drivetrain.already_sharded.",
                index,
                one.what,
                listed(map(str, sorted(empty))),
            )
            ranks = filled
    settings = _different([each.settings for each in ranks.values()])
    parts = _different([{name: digest for name, (digest, _) in each.parts.items()} for each in ranks.values()])
    other_samples = _other_samples([each.containers for each in ranks.values()])
    lengths = {each.length for each in ranks.values()}
    holds_other = bool(parts or other_samples or len(lengths) > 1)
    told = {}
    for rank, each in ranks.items():
        if holds_other:
            words = [] if each.length is None else [f"{each.length} samples"]
            words += [each.parts[name][1] for name in parts if name in each.parts]
        else:
            words = [f"{name} {each.settings.get(name, 'none')}" for name in settings]
        told[rank] = ", ".join(words)
    if holds_other:
        differing = [*parts, *other_samples, *(["the number of samples"] if len(lengths) > 1 else [])]
        only_values = not parts and len(lengths) == 1
        raise UsageError(
            f"ranks hold different samples in loader {index} of this prepare, a {one.what}. A prepared loader shares "
            "its samples out over the ranks, so that "
            + ("" if only_values else "these parts would be shared out a second time, and ")
            + f"some samples would not be read. Different: {listed(differing)}\n{_by_rank(told)}",
            cure=SEED_CURE if only_values else PARTS_CURE,
        )
    if settings:
        raise UsageError(
            f"ranks make loader {index} of this prepare, a {one.what}, with different settings\n{_by_rank(told)}",
            cure=SETTINGS_CURE,
        )
    seeds = [each.seed for each in ranks.values()]
    if one.coordinate is None and len(set(seeds)) > 1:
        logger.warning(
            "The generator of loader %d of this prepare has another seed on each rank (%s); the order of samples is "
            "that of rank 0. Seed it alike on every rank.",
            index,
            listed(map(str, seeds)),
        )


def _say_unread(index: int, ranks: dict[int, Description]) -> None:
    """Warn where the main process reads for all, and seems to hold a part that is its own."""
    if len(ranks) == 1 or not all(each.described for each in ranks.values()):
        return
    own = [name for name in ranks[0].numbers if all(each.numbers.get(name) == rank for rank, each in ranks.items())]
    parts = _different([{name: digest for name, (digest, _) in each.parts.items()} for each in ranks.values()])
    differing = [*parts, *_other_samples([each.containers for each in ranks.values()])]
    if own or differing:
        held = f"is the number of the rank ({listed(own)})" if own else f"differs by rank ({listed(differing)})"
        logger.warning(
            "Loader %d of this prepare (%s) is read by the main process alone, for all ranks (dispatch_batches), and "
            "what its data holds %s. %s",
            index,
            ranks[0].what,
            held,
            UNREAD,
        )


UNREAD = (
    "Where that is a part of the data for each rank, the parts of all ranks but the main process are never read: let "
    "the main process hold all samples; or set dispatch_batches to false and mark the loader, "
    "accelerator.prepare(drivetrain.already_sharded(loader))."
)


def _different(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose values are not the same in all."""
    names = dict.fromkeys(name for each in found for name in each)
    return [name for name in names if any(each.get(name) != found[0].get(name) for each in found)]


def _other_samples(ranks: Sequence[Sequence[Container]]) -> list[str]:
    """Data sets of which ranks hold different samples.

    That is so where all that holds its samples differs: something drawn for each sample, beside samples that are the
    same, may. Labels and ids alone say so only where there is nothing else.
    """
    found = [{(each.owner, each.name): each for each in containers} for containers in ranks]
    owners = dict.fromkeys(owner for owner, _ in found[0])
    different = []
    for owner in owners:
        names = [name for name in found[0] if name[0] == owner and all(name in each for each in found)]
        names = [name for name in names if not found[0][name].whole_numbers] or names
        if names and all(len({each[name].digest for each in found}) > 1 for name in names):
            different.append(f"samples of {owner}")
    return different


def _by_rank(told: Mapping[int, str]) -> str:
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(told.items())]
    return "\n".join(lines if len(lines) <= 16 else [*lines[:16], f"  and {len(lines) - 16} more"])


# ---- what a first pass reads -----------------------------------------------------------------------------------------


@final
class PassComparison:
    """Compares what a pass over a prepared loader reads with the other ranks, beside the training. Not collective.

    Ranks that are not told to read the same samples raise within seconds, at their next call.

    Args:
        number: of the loader.
        what: for messages.
    """

    def __init__(self, number: int, what: str) -> None:
        self._number, self._what = number, what
        self._order: OrderComparison | None = None

    def order(self, epoch: int) -> OrderComparison:
        """Return what compares the order of a pass that begins, after what is not compared of the one before."""
        self.tell_rest()
        self._order = OrderComparison(self._tell, epoch)
        if Current.monitor is not None:
            Current.monitor.before_agreement[self._number] = self.tell_rest
        return self._order

    def tell_rest(self) -> None:
        """Compare what the last pass has read of an order since it was last compared."""
        if self._order is not None:
            self._order.tell()

    def samples(self, digest: int, epoch: int, stream: int = 0) -> None:
        """Compare the first samples of a stream, by their digest."""
        self._tell(f"stream/{epoch}/{stream}", digest, f"samples with digest {digest & 0xFFFFFFFF:08x}")

    def _tell(self, key: str, digest: int, text: str, cure: str = PARTS_CURE) -> None:
        if Current.monitor is not None:
            what = (
                f"ranks read different samples in loader {self._number}, a {self._what}. A prepared loader shares its "
                "samples out over the ranks, so that these parts are shared out a second time, and some samples are "
                "not read"
            )
            Current.monitor.tell(f"loader/{self._number}/{key}", digest, text, what=what, cure=cure)


ORDER_CURE = (
    f"{PARTS_CURE} Where one rank alone draws random numbers between batches, give the sampler a generator of its own "
    "that nothing else draws from."
)
_COMPARED_READS = 64
"""Reads after which an order is compared again, beside those whose number is a power of two."""


@final
class OrderComparison:
    """Compares the order that one pass reads from a sampler, whatever the sampler draws late. Not collective.

    Each read of whole numbers is added to a digest of all before it, so that no difference is left out; of other units
    only those reads after which it is told. It is told after the first, second, fourth, ... read and each 64th, when
    the sampler ends, and where a later pass, a save or the end of the training finds it not told.

    Args:
        tell: is given a key, a digest, a text and a cure.
        epoch: number of the pass.
    """

    def __init__(self, tell: Callable[[str, int, str, str], None], epoch: int) -> None:
        self._tell, self._epoch = tell, epoch
        self._digest = self._num_reads = self._num_told = self._start = self._end = 0
        self._units: Any = ()

    def read(self, start: int, units: Any, *, ended: bool) -> None:
        """Add a read.

        Args:
            start: place of the first of the units in the pass.
            units: indices or batches; the same places on every rank.
            ended: the sampler has no more.
        """
        if len(units):
            self._num_reads += 1
            self._start, self._end, self._units = start, start + len(units), units
            number = self._num_reads
            due = not number & (number - 1) or not number % _COMPARED_READS
            if isinstance(units, np.ndarray):
                self._digest = zlib.crc32(units.tobytes(), self._digest)
            elif _are_numbers(units):
                # 1 us for 64 numbers, and as much for 8 lists of 8.
                self._digest = zlib.crc32(repr(units).encode(), self._digest)
            elif due:
                content = Content()
                for unit in units[:: max(1, len(units) // _MAX_ELEMENTS)]:
                    content.add(unit)
                self._digest = hash((self._digest, content.digest or 0)) & 0xFFFFFFFF
            if due:
                self.tell()
        if ended:
            self.tell()

    def tell(self) -> None:
        """Compare what was read since the last time."""
        if self._num_told != self._num_reads:
            self._num_told = self._num_reads
            text = f"{_beginning(self._units)}, ... from place {self._start} of the sampler's order"
            self._tell(f"order/{self._epoch}/{self._end}", self._digest, text, ORDER_CURE)


def _are_numbers(units: Any) -> bool:
    """Whether these are integers, or lists and tuples of them, which print alike on every rank."""
    kinds = set(map(type, units))
    return _WHOLE.issuperset(kinds) or (
        kinds <= {list, tuple} and all(_WHOLE.issuperset(map(type, unit)) for unit in units)
    )


_WHOLE = frozenset({int, np.int32, np.int64})
"""Lists the types of indices; ``np.random.permutation`` yields the last."""


NUM_FIRST = 8
"""Samples of a stream that are compared."""


@final
class FirstSamples:
    """Passes a stream on and keeps a digest of its first samples.

    Args:
        floats: floating-point numbers are the same on all ranks: what the stream draws is seeded.
    """

    def __init__(self, *, floats: bool) -> None:
        self._content, self._floats = Content(), floats

    def watch(self, samples: Iterable[Any]) -> Iterator[Any]:
        """The same samples."""
        rest = iter(samples)
        for sample in islice(rest, NUM_FIRST):
            self._content.add(sample)
            yield sample
        yield from rest

    def take(self) -> int | None:
        """The digest, once; ``None`` where nothing can be said."""
        content, self._content = self._content, Content()
        if not content.varies and not self._floats:
            return None
        return content.of_samples


# ---- what a first forward is given -----------------------------------------------------------------------------------

_TRIES = 3
"""Forwards whose inputs are looked at, where those of the first are all zeros or the like."""


@final
class FirstInputs:
    """Looks at the inputs of a model's first forward in training, and compares them where no prepared loader is read.

    The same inputs on all ranks mean that each trains on the same samples, as with a loader that was not prepared. The
    numbers are those of one process then, so that it is a warning. Inputs that were normalised over the rows of a rank
    are others on one process, of which rank 0 warns. Reads the inputs of one forward.

    Args:
        backend: of the model.
        index: of the model.
        name: of its class.
    """

    def __init__(self, backend: Backend, index: int, name: str) -> None:
        self._backend, self._index, self._name, self._left = backend, index, name, _TRIES
        self._looked = backend.topology.rank > 0
        """Inputs were looked at for being normalised, which rank 0 does for all."""

    def done(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Compare these inputs, or wait for others: ``False``. Not collective."""
        if not self._looked:
            self._looked = True
            self._say_normalised(args, kwargs)
        active, monitor = loaders_on(self._backend), Current.monitor
        if monitor is None or (active is not None and active.current is not None):
            return True
        self._left -= 1
        tensors = [leaf for _, leaf in trees.leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.dim()]
        parts = [part for part in map(_part_of_tensor, tensors) if part is not None and part.size]
        if not any((part != part[0]).any() for part in parts):
            return not self._left
        content = Content(*parts)
        assert content.digest is not None
        site = script_line("".join(traceback.format_stack()))
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
        monitor.tell_same(
            f"forward/{self._index}",
            content.digest,
            f"All ranks have given the same inputs ({shapes}) to {self._name} in its first forward ({site}), and no "
            "prepared loader was being read: every process trains on the same samples, so that more processes bring "
            "nothing. Prepare the loader and read what prepare returns: `loader = accelerator.prepare(loader)`. Where "
            "that is intended, nothing is wrong.",
        )
        return True

    def _say_normalised(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [leaf for _, leaf in trees.leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        found = [list(tensor.shape) for tensor in tensors if is_standardised(tensor)]
        if found:
            logger.warning(
                "Inputs of %s (%s) have mean 0 and deviation 1 over their %d rows, which are those of one process: on "
                "%d data-parallel ranks they are other numbers than where one process normalises the whole batch. "
                "Normalise by numbers of the data set, found before training; or by those of all ranks: every = "
                "accelerator.gather(x), then (x - every.mean(0)) / every.std(0).",
                self._name,
                listed(map(str, found)),
                found[0][0],
                self._backend.topology.dp_size,
            )
