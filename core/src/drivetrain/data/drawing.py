"""Draws the order of samples from the script's generators as torch's ``DataLoader`` does, and repeats it on a resume.

A sampler is read when torch would read it, with the generators that it has, so the order of an epoch and the states
afterwards are those of the plain loader. The states before the draws are kept (:class:`OrderLog`), from which another
process repeats them. Ranks whose states differ follow rank 0 (:class:`Board`).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import random
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, islice
from types import FunctionType
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler

from drivetrain.backend import Backend
from drivetrain.data.comparison import OrderComparison
from drivetrain.distributed.rank_numbers import is_generator
from drivetrain.distributed.watchdog import default_store
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.logging import get_logger

logger = get_logger(__name__)

# ---- states of generators -------------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """The state of torch's, numpy's or Python's generator, as nested tuples of numbers, words and bytes.

    ``numpy.random`` and ``random`` stand for the global ones. Of numpy's, the second of a pair of normal numbers that
    its legacy functions keep for the next call is left out.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if generator is _PYTHON or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _frozen(generator.bit_generator.state)
    if generator is _NUMPY:
        bits = _NUMPY.get_bit_generator()
        if type(bits) is np.random.MT19937 and _reads_memory():
            # Custom samplers are asked for it before and after each batch, and numpy takes 30 us for a state.
            return ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)
    return _frozen(generator.get_state(legacy=False))


def set_state_of(generator: Any, state: Any) -> None:
    """Set what :func:`state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif generator is _PYTHON or isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _thawed(state)
    elif isinstance(state, bytes):
        words = np.frombuffer(state, dtype=np.uint32)
        generator.set_state(("MT19937", words[:-1], int(words[-1])))
    else:
        generator.set_state(_thawed(state))


# Modules, whose functions of these names read and set the global generators.
_NUMPY: Any = np.random
_PYTHON: Any = random

_TWISTER_BYTES = 4 * 625
"""numpy's ``MT19937`` in memory: 624 words, and the place among them."""


@cache
def _reads_memory() -> bool:
    """Whether numpy keeps the state at the address that it gives, as :func:`state_of` reads it."""
    bits = np.random.MT19937(5)
    np.random.RandomState(bits).random_sample(3)
    words = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES), dtype=np.uint32)
    state: Any = bits.state["state"]
    return bool((words[:-1] == state["key"]).all()) and int(words[-1]) == state["pos"]


def _frozen(state: Any) -> Any:
    if isinstance(state, Mapping):
        return ("dict", tuple((key, _frozen(value)) for key, value in state.items()))
    if isinstance(state, np.ndarray):
        return ("array", state.dtype.str, state.tobytes())
    return state.item() if isinstance(state, np.generic) else state


def _thawed(state: Any) -> Any:
    if not isinstance(state, tuple):
        return state
    if state[0] == "dict":
        return {key: _thawed(value) for key, value in state[1]}
    _, dtype, values = state
    return np.frombuffer(values, dtype=dtype).copy()


def encoded(state: Any) -> Any:
    """A state as JSON has it: bytes and long rows of 32-bit numbers in base64."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    if not isinstance(state, tuple):
        return state
    if len(state) > 16 and all(isinstance(each, int) for each in state):
        return {"words": base64.b64encode(np.array(state, dtype="<u4").tobytes()).decode()}
    return [encoded(each) for each in state]


def decoded(state: Any) -> Any:
    """The reverse of :func:`encoded`."""
    if isinstance(state, list):
        return tuple(decoded(each) for each in state)
    if not isinstance(state, Mapping):
        return state
    if "bytes" in state:
        return base64.b64decode(state["bytes"])
    return tuple(np.frombuffer(base64.b64decode(state["words"]), dtype="<u4").tolist())


def generators(sampler: Any) -> Iterator[Any]:
    """Random generators that a sampler holds, and those of samplers inside it, in the order of its attributes."""
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if is_generator(value):
            yield value
        elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            yield from generators(value)


def _drawn_from(sampler: Any) -> list[Any]:
    """Generators that a sampler's ``__iter__`` may draw from, beside the global ones, each once."""
    found = list(generators(sampler))
    function = getattr(type(sampler), "__iter__", None)
    if isinstance(function, FunctionType):
        found += [cell.cell_contents for cell in function.__closure__ or () if _holds_generator(cell)]
        found += filter(is_generator, map(function.__globals__.get, function.__code__.co_names))
    return list({id(each): each for each in found}.values())


def _holds_generator(cell: Any) -> bool:
    try:
        return is_generator(cell.cell_contents)
    except ValueError:  # a variable that was never set
        return False


# ---- what an order follows from -------------------------------------------------------------------------------------

_ITER = -1
"""Place of the call of ``iter`` among the units of a pass."""

_BLOCK = 1 << 16
"""Units that are read at once where they are passed over."""

KEPT_DRAWS = 32
"""Draws of one pass, each after draws of others from the same generators, that a position keeps: 15 kB for each."""


@dataclass
class OrderLog:
    """Records what the order of one pass follows from, as far as it has been drawn.

    Args:
        draws: ``(unit, states)``: to read this unit, the sampler drew from generators in these states, which are not
            those in which its last draw had left them. Unit -1 stands for the call of ``iter``.
        pulled: units that the sampler has given.
        ended: it has said that there are no more.
        lost: there were more draws than are kept, so that the order cannot be repeated beyond them.
        epochs: what the samplers said of their epochs when the pass began.
    """

    draws: list[tuple[int, Any]] = field(default_factory=list)
    pulled: int = 0
    ended: bool = False
    lost: bool = False
    epochs: list[int | None] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether there is an order to be repeated."""
        return bool(self.draws)

    def copy(self) -> OrderLog:
        """Another one for a further pass in the same order."""
        return OrderLog(list(self.draws), self.pulled, self.ended, self.lost)

    def add(self, unit: int, states: Any) -> None:
        """Keep a draw."""
        if len(self.draws) < KEPT_DRAWS:
            self.draws.append((unit, states))
        else:
            self.lost = True

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        draws = [[unit, encoded(states)] for unit, states in self.draws]
        return {"draws": draws, "pulled": self.pulled, "ended": self.ended, "lost": self.lost}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> OrderLog:
        """The reverse of :meth:`to_json`."""
        draws = [(int(unit), decoded(states)) for unit, states in saved["draws"]]
        return cls(draws, int(saved["pulled"]), bool(saved["ended"]), bool(saved["lost"]))


# ---- agreement ------------------------------------------------------------------------------------------------------

_WAIT_SECONDS = 10.0
"""Timeout for the first rank, after which a rank assumes that only it iterates."""

_PAUSE_SECONDS = 0.0002, 0.02
"""Shortest and longest pause between two looks of a rank that waits."""

_KEPT_PASSES = 8
"""Passes of a loader for which a rank's states stay in the store, for ranks that come later."""

_serial = count()
"""Numbers the boards, which are made in the same order on every rank."""


class Board(ABC):
    """Lets ranks that read one order agree on what each pass over a loader follows from: the first rank's states."""

    def __init__(self) -> None:
        self._passes = -1

    def key(self) -> str:
        """The key of the next pass, the same on every rank that has begun as many."""
        self._passes += 1
        return str(self._passes)

    @abstractmethod
    def agree(self, key: str, value: Any) -> Any:
        """The states that the pass follows from, ``None`` where they are this rank's own.

        Args:
            key: of :meth:`key`.
            value: this rank's states.
        """


@final
class StoreBoard(Board):
    """Through the process group's store. Not collective.

    The first rank waits for nobody. The others wait for it, and one that waits in vain goes on by itself; ranks that
    come after that, the first one too, follow it. So any rank may iterate alone, and ranks that iterate together read
    one order in any case.

    Args:
        backend: started.
        first: the global rank that is followed.
    """

    def __init__(self, backend: Backend, first: int) -> None:
        super().__init__()
        self._store = dist.PrefixStore(f"order/{next(_serial)}", default_store())  # type: ignore[attr-defined]
        self._rank, self._first = backend.topology.rank, first
        self._waits = self._rank != first

    def agree(self, key: str, value: Any) -> Any:
        digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
        if not (self._waits and self._comes(key)):
            # The states before the word that they are there.
            self._store.set(f"{key}/{self._rank}", json.dumps(encoded(value)))
            if int(key) >= _KEPT_PASSES:
                self._store.delete_key(f"{int(key) - _KEPT_PASSES}/{self._rank}")
            said = self._store.compare_set(key, "", f"{self._rank} {digest}")
        else:
            said = self._store.get(key)
        rank, of_that_rank = said.decode().split()
        if of_that_rank == digest:
            return None
        if not self._store.check([f"{key}/{rank}"]):
            raise DrivetrainError(
                f"rank {rank} is more than {_KEPT_PASSES} passes over this loader ahead, and its random numbers differ "
                "from this rank's",
                cure="Iterate the loader as often on every rank, or seed all ranks alike (set_seed).",
            )
        return decoded(json.loads(self._store.get(f"{key}/{rank}")))

    def _comes(self, key: str) -> bool:
        """Wait until a rank has said what this pass follows from."""
        pause, deadline = _PAUSE_SECONDS[0], time.monotonic() + _WAIT_SECONDS
        while not self._store.check([key]):
            # Looked at rather than waited for, so that signals reach the script.
            if time.monotonic() > deadline:
                self._waits = False
                logger.info(
                    "Rank %d has waited %.0f s for rank %d to begin this pass over a loader, and goes on alone.",
                    self._rank,
                    _WAIT_SECONDS,
                    self._first,
                )
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        return True


@final
class CollectiveBoard(Board):
    """A board by broadcasts of the backend, if its ranks have no store: a shuffled pass then begins collectively."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def agree(self, key: str, value: Any) -> Any:
        del key
        first = decoded(self._backend.broadcast_object(encoded(value)))
        return None if first == value else first


def make_board(backend: Backend, *, sharded: bool) -> Board | None:
    """Return the board of the ranks that read one order; ``None`` if this rank reads its own.

    Args:
        backend: started.
        sharded: each data-parallel rank has an order of its own.
    """
    topology = backend.topology
    peers = range(topology.world_size)
    if sharded:
        peers = [rank for rank in peers if topology.mesh.dp_rank(rank) == topology.dp_rank]  # type: ignore[assignment]
    if len(peers) < 2:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return CollectiveBoard(backend)
    return StoreBoard(backend, peers[0])


# ---- samplers -------------------------------------------------------------------------------------------------------


class Units(ABC):
    """One pass over a sampler, as far as it is read.

    Attributes:
        takes_seed: :meth:`states` is a number that is drawn once, and all draws follow from it.
    """

    takes_seed = False

    @abstractmethod
    def begin(self) -> None:
        """Call ``iter`` on the sampler."""

    @abstractmethod
    def states(self) -> Any:
        """The states of the generators that the next draw follows from."""

    @abstractmethod
    def follow(self, states: Any) -> None:
        """Draw from private generators in these states."""

    def join(self, states: Any) -> None:
        """Draw from private generators in these states, in place of those of this rank's that are in others."""
        self.follow(states)

    @abstractmethod
    def go_live(self) -> None:
        """Draw from the script's generators, as they are."""

    @abstractmethod
    def pull(self, number: int) -> tuple[Sequence[Any] | np.ndarray, bool]:
        """At least one further unit where there is one, and whether the sampler has ended.

        Args:
            number: of units that are needed.
        """


@final
class TorchUnits(Units):
    """A pass over torch's ``RandomSampler``, ``SubsetRandomSampler`` or ``WeightedRandomSampler``.

    Makes the calls that the sampler's ``__iter__`` makes, when it would make them, without a Python number for each
    sample. A ``RandomSampler`` without a generator takes a seed from torch's state: that is its state here.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.takes_seed = type(sampler) is RandomSampler and sampler.generator is None
        self._seed: int | None = None
        self._live = torch.Generator() if self.takes_seed else sampler.generator or _default_generator(sampler)
        self._generator = self._live
        self._chunks: Iterator[np.ndarray | Sequence[Any]] = iter(())

    def begin(self) -> None:
        self._chunks = self._draw()

    def states(self) -> Any:
        if not self.takes_seed:
            return state_of(self._generator)
        if self._seed is None:
            self.follow(int(torch.empty((), dtype=torch.int64).random_().item()))
        return self._seed

    def follow(self, states: Any) -> None:
        if self.takes_seed:
            self._seed = states
            self._generator.manual_seed(states)
            return
        self._generator = torch.Generator(device=self._live.device)
        set_state_of(self._generator, states)

    def go_live(self) -> None:
        self._generator = self._live

    def pull(self, number: int) -> tuple[Sequence[Any] | np.ndarray, bool]:
        del number
        chunk = next(self._chunks, None)
        return ((), True) if chunk is None else (chunk, False)

    def _draw(self) -> Iterator[np.ndarray | Sequence[Any]]:
        sampler = self._sampler
        if type(sampler) is RandomSampler:
            size, wanted = len(sampler.data_source), sampler.num_samples
            if sampler.replacement:
                for _ in range(wanted // 32):
                    yield self._integers(size, 32)
                yield self._integers(size, wanted % 32)
                return
            for _ in range(wanted // size):
                yield torch.randperm(size, generator=self._generator).numpy()
            # Drawn also where the permutations come out even, when the sampler is asked for one more.
            yield torch.randperm(size, generator=self._generator)[: wanted % size].numpy()
        elif type(sampler) is SubsetRandomSampler:
            order = torch.randperm(len(sampler.indices), generator=self._generator).tolist()
            yield [sampler.indices[index] for index in order]
        else:
            yield torch.multinomial(
                sampler.weights, sampler.num_samples, sampler.replacement, generator=self._generator
            ).tolist()

    def _integers(self, high: int, number: int) -> np.ndarray:
        drawn = torch.randint(high, (number,), dtype=torch.int64, generator=self._generator)
        array: np.ndarray = drawn.numpy()
        return array


def _default_generator(sampler: Any) -> torch.Generator:
    weights = getattr(sampler, "weights", None)
    if weights is None or weights.device.type == "cpu":
        return torch.default_generator
    device = weights.device
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


_GLOBAL = 3
"""Number of global generators."""


@final
class ScriptUnits(Units):
    """A pass over any other sampler, which may draw from the global generators and from those that it holds."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        held = _drawn_from(sampler)
        self._generators = [torch.default_generator, _NUMPY, _PYTHON, *held]
        self._units: Iterator[Any] = iter(())
        self._private: dict[int, Any] = {}
        """States of private generators, by the place of the generator that each stands for."""

    def begin(self) -> None:
        with self._drawing():
            self._units = iter(self._sampler)

    def states(self) -> Any:
        private = self._private
        if not private:
            return tuple(map(state_of, self._generators))
        return tuple(
            private[place] if place in private else state_of(each) for place, each in enumerate(self._generators)
        )

    def follow(self, states: Any) -> None:
        self._check(states)
        self._private = dict(enumerate(states))

    def join(self, states: Any) -> None:
        self._check(states)
        mine = self.states()
        self._private = {place: state for place, state in enumerate(states) if state != mine[place]}

    def go_live(self) -> None:
        self._private = {}

    def pull(self, number: int) -> tuple[Sequence[Any] | np.ndarray, bool]:
        with self._drawing():
            units = list(islice(self._units, number))
        return units, len(units) < number

    def _check(self, states: Any) -> None:
        if len(states) != len(self._generators):
            raise UsageError(
                f"the order of these samples was drawn by a sampler with {len(states) - _GLOBAL} generator(s), and "
                f"{type(self._sampler).__name__} has {len(self._generators) - _GLOBAL} here",
                cure="Iterate, and resume, with the same sampler on every rank.",
            )

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Context in which the generators that private ones stand for have the states of those."""
        if not self._private:
            yield
            return
        swapped = [(place, self._generators[place]) for place in self._private]
        mine = [_NUMPY.get_state() if each is _NUMPY else state_of(each) for _, each in swapped]
        for place, generator in swapped:
            set_state_of(generator, self._private[place])
        try:
            yield
        finally:
            for (place, generator), state in zip(swapped, mine, strict=True):
                self._private[place] = state_of(generator)
                if generator is _NUMPY:
                    _NUMPY.set_state(state)
                else:
                    set_state_of(generator, state)


@final
class DrawnOrder:
    """One pass's units by position, read forward from a sampler when they are asked for.

    Args:
        units: the sampler's.
        log: what the order follows from. One that has begun is repeated, and then read on.
        keep: how many of the first units are remembered for :meth:`head`.
        length: number of units, ``None`` where only the sampler knows.
        agreement: returns a function that is given this rank's states, and returns those that draws follow from, or
            ``None`` where it is these. ``None`` where this rank reads alone.
        eager: :meth:`begin` calls ``iter``, as torch does on what gives whole batches.
        compared: is given each read, for a comparison with other ranks.
    """

    def __init__(
        self,
        units: Units,
        log: OrderLog,
        keep: int,
        length: int | None,
        agreement: Callable[[], Callable[[Any], Any]] | None,
        *,
        eager: bool = False,
        compared: OrderComparison | None = None,
    ) -> None:
        self._units, self._log, self._keep = units, log, keep
        self._repeats = log.begun
        self._agreement = None if self._repeats and units.takes_seed else agreement
        self._eager, self._compared = eager, compared
        self.length = length
        self._chunks: deque[tuple[int, Any]] = deque()
        self._end = 0
        self._first: list[Any] = []
        self._begun = self._ended = self._agreed = False
        self._last: Any = None
        if self._repeats and log.lost:
            warnings.warn(
                f"the sampler of this loader drew more than {KEPT_DRAWS} times in this epoch from generators that the "
                "script drew from in between, so the rest of the epoch is another one than without the restart, and "
                "samples may repeat or be left out. Give the sampler a generator of its own.",
                UserWarning,
                stacklevel=2,
            )

    def begin(self) -> None:
        """Call ``iter`` on the sampler where torch does; with workers it calls it twice."""
        if self._eager and not self._repeats:
            self._log.draws.clear()
            self._begin()

    def take(self, start: int, stop: int) -> list[Any]:
        """Units ``start`` to ``stop - 1``; fewer at the end. ``start`` never goes back."""
        if self._repeats:
            self._repeat(start)
        while self._end < stop and not self._ended:
            if not self._begun:
                self._begin()
            pull = partial(self._units.pull, min(stop - self._end, _BLOCK))
            # Again where iter() has drawn: torch draws the seed of its workers in between.
            units, ended = self._read(pull, self._end, agree=not self._agreed)
            if self._compared is not None:
                self._compared.read(self._end, units, ended=ended)
            self._keep_units(units, ended, start)
            self._agreed = True
            self._log.pulled, self._log.ended = self._end, self._ended
        self._forget(start)
        taken: list[Any] = []
        for begin, chunk in self._chunks:
            part = chunk[max(start - begin, 0) : max(stop - begin, 0)]
            # tolist() gives Python integers, which every dataset accepts.
            taken += part.tolist() if isinstance(part, np.ndarray) else part
        return taken

    def head(self, count: int) -> list[Any]:
        """The first units of the epoch, at most ``count``; never reads further than :meth:`take` has."""
        return self._first[:count]

    def _begin(self) -> None:
        self._begun = True
        if isinstance(self._units, TorchUnits):
            self._units.begin()
        else:
            self._last = None
            self._read(self._units.begin, _ITER, agree=self._eager)

    def _read(self, read: Callable[[], Any], unit: int, *, agree: bool) -> Any:
        """Read from the sampler, and keep the states that it drew from."""
        units = self._units
        if agree and self._agreement is not None:
            units.go_live()
            before = units.states()
            agreed = self._agreement()(before)
            if agreed is not None:
                before = agreed
                units.join(before)
        else:
            before = units.states()
        value = read()
        after = units.states()
        if units.takes_seed or after != before:
            if before != self._last:
                self._log.add(unit, before)
            self._last = after
        return value

    def _keep_units(self, units: Any, ended: bool, start: int) -> None:
        if len(self._first) < self._keep:
            part = units[: self._keep - len(self._first)]
            self._first += part.tolist() if isinstance(part, np.ndarray) else part
        if len(units):
            self._chunks.append((self._end, units))
            self._end += len(units)
        self._ended = ended
        self._forget(start)

    def _forget(self, start: int) -> None:
        """Drop units before this one."""
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= start:
            self._chunks.popleft()

    def _repeat(self, start: int) -> None:
        """Draw again what was drawn, from the same states, then go on with the script's generators as they are."""
        self._repeats, self._begun = False, True
        units, log, draws = self._units, self._log, deque(self._log.draws)
        if draws[0][0] == _ITER:
            units.follow(draws.popleft()[1])
        units.begin()
        while self._end < log.pulled or (log.ended and not self._ended):
            if draws and draws[0][0] == self._end:
                units.follow(draws.popleft()[1])
            until = draws[0][0] if draws else log.pulled
            self._keep_units(*units.pull(min(max(until - self._end, 1), _BLOCK)), start)
            if self._ended and self._end < log.pulled:
                break  # The data has become shorter, which was remarked on when the position was loaded.
        units.go_live()
