"""Draws different random numbers on each data-parallel coordinate, in forwards and in reads of samples.

The script's own generators stay the same on every rank, so that what the script draws (weights, splits, folds) is alike
everywhere. Forwards of prepared models and reads of prepared loaders differ in samples between coordinates. They run
with generators whose state follows from the script's state, or from the position in the data, and the coordinate.
Peers along other axes (``tp``, ``pp``, ``cp``) have one coordinate and draw the same. Nothing is kept between calls, so
a checkpoint needs no more than the script's state and the position. A run with one coordinate is not changed.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.distributed.rng import (
    added_to_seed,
    device_state,
    draws_alike,
    registered_generator,
    set_device_state,
)

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: seeds of neighbouring coordinates share no bits.
_SEEDS = 1 << 63
_NUMPY_SEEDS = 1 << 32
_numpy = np.random


def numbers_coordinate(dp_rank: int) -> int:
    """The coordinate whose random numbers this rank draws: its own, or 0 after ``set_seed(device_specific=False)``."""
    return 0 if draws_alike() else dp_rank


# ---- forwards --------------------------------------------------------------------------------------------------------


@final
class ForwardNumbers:
    """Context of a forward: torch's generators, of the CPU and of the device, draw numbers of this coordinate.

    On exit the script's generators are where they were, or one number further where the forward drew from them: the
    same on every rank, however many rows each had. Python's and numpy's generators are the script's inside too: they
    decide about layers (stochastic depth), and ranks that call other layers would wait for each other. Not collective.

    Args:
        dp_rank: this rank's data-parallel coordinate.
        device: of this rank.
    """

    def __init__(self, dp_rank: int, device: str) -> None:
        self._dp_rank = dp_rank
        place = torch.device(device)
        self._device = _DeviceNumbers(place) if place.type != "cpu" else None
        self._entered: list[tuple[Tensor, bytes, Any] | None] = []
        self._last, self._seed, self._begun = b"", 0, b""
        """The script's state at the last forward, and the seed derived from it: most forwards find it unchanged."""

    def __enter__(self) -> None:
        # Inside of torch.func.vmap, grad and the like a state cannot be read; numbers are the script's there.
        if draws_alike() or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 (no public word)
            self._entered.append(None)
            return
        cpu = torch.default_generator
        before = cpu.get_state()
        state = _bytes(before)
        if state != self._last:
            seed = _own(_digest(state), self._dp_rank)
            cpu.manual_seed(seed)
            self._last, self._seed, self._begun = state, seed, _bytes(cpu.get_state())
        else:
            cpu.manual_seed(self._seed)
        on_device = None if self._device is None else self._device.enter(self._dp_rank)
        self._entered.append((before, self._begun, on_device))

    def __exit__(self, *_: object) -> None:
        entered = self._entered.pop()
        if entered is None:
            return
        before, begun, on_device = entered
        cpu = torch.default_generator
        drew = _bytes(cpu.get_state()) != begun
        cpu.set_state(before)
        if drew:
            # Without an operation in place, which torch.func.vmap would refuse.
            torch.randint(_SEEDS - 1, (1,), device="cpu")
        if self._device is not None and on_device is not None:
            self._device.leave(on_device)


@final
class _DeviceNumbers:
    """The generator of an accelerator. One that counts is read and set on the host: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self, dp_rank: int) -> Any:
        device, counter = self._device, self._counter()
        if counter is not None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # A graph's generator takes its seed when it is replayed.
                return None
            seed, offset = counter.initial_seed(), counter.get_offset()
            counter.manual_seed(_own(_digest(repr((seed, offset)).encode()), dp_rank))
            return seed, offset
        before = device_state(device).cpu()
        seed = _own(_digest(_bytes(before)), dp_rank)
        registered = registered_generator(device.type)
        if registered is not None:
            registered.seed(seed)
        else:
            torch.get_device_module(device).manual_seed(seed)
        return before, _bytes(device_state(device).cpu())

    def leave(self, entered: Any) -> None:
        counter = self._counter()
        if counter is not None:
            seed, offset = entered
            drew = counter.get_offset() != 0
            counter.manual_seed(seed)
            # By as much as one operation moves it.
            counter.set_offset(offset + 4 * drew)
            return
        before, begun = entered
        drew = _bytes(device_state(self._device).cpu()) != begun
        set_device_state(self._device, before)
        if drew:
            torch.rand(1, device=self._device)

    def _counter(self) -> torch.Generator | None:
        """The device's generator where it counts what it draws (CUDA, ROCm, XPU)."""
        if self._device.type not in ("cuda", "xpu"):
            return None
        module = torch.get_device_module(self._device)
        index = module.current_device() if self._device.index is None else self._device.index
        generator: torch.Generator = module.default_generators[index]
        return generator


def _bytes(state: Tensor) -> bytes:
    # Compared and hashed outside of torch, whatever modes and transforms the forward runs under.
    return state.numpy().tobytes()


def _own(seed: int, dp_rank: int) -> int:
    return (seed + (dp_rank + 1) * _MIX) % _SEEDS


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1


# ---- reading ---------------------------------------------------------------------------------------------------------


def seed_of_run() -> int:
    """Return torch's seed, the same on every rank that was seeded by one call of ``set_seed``."""
    return torch.initial_seed() - added_to_seed()


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's (CPU) global generators of this process."""
    random.seed(seed)
    _numpy.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)


def host_digest() -> int:
    """Return a hash of the states of Python's, numpy's and torch's (CPU) global generators."""
    state = random.getstate(), _numpy.get_state(legacy=False), _bytes(torch.default_generator.get_state())
    return _digest(pickle.dumps(state))


def is_generator(value: Any) -> bool:
    """Whether this is a random generator of torch's, numpy's or Python's."""
    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % _NUMPY_SEEDS)


_DEPTH = 8
_ITEMS = 64
"""Containers that are longer hold samples, not transforms."""


def held_generators(*readers: Any) -> list[Any]:
    """Random generators that reads draw from, beside the global ones.

    They are looked for in attributes of datasets, of their transforms and inner datasets, in what functions close over,
    and among the globals that their functions name.

    Args:
        readers: the dataset, and the collate function.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH or isinstance(value, type | ModuleType | Tensor | np.ndarray):
            return
        seen.add(id(value))
        if is_generator(value):
            found.append(value)
        elif depth > 0 and isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
            return  # A model, not a transform.
        else:
            for each in _parts(value):
                look(each, depth + 1)

    for each in readers:
        look(each, 0)
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of an object that reads samples."""
    if isinstance(value, list | tuple):
        yield from value if len(value) <= _ITEMS else ()
    elif isinstance(value, dict):
        yield from value.values() if len(value) <= _ITEMS else ()
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # A variable that was never set.
                yield cell.cell_contents
        yield from filter(is_generator, map(value.__globals__.get, value.__code__.co_names))
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()
        yield from (getattr(type(value), name, None) for name in ("__getitem__", "__getitems__", "__call__", "forward"))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state(legacy=False)


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _digest_of(state: Any) -> int:
    return _digest(_bytes(state) if isinstance(state, Tensor) else pickle.dumps(state))


@final
class Held:
    """The generators that reads draw from, seeded for one batch from their own state and the batch's seed.

    Args:
        readers: see :func:`held_generators`.
    """

    def __init__(self, *readers: Any) -> None:
        self._generators = held_generators(*readers)
        self._digests = [_digest_of(_state_of(each)) for each in self._generators]

    def seed(self, seed: int) -> None:
        """Seed them from the state that each had when this object was made."""
        for generator, digest in zip(self._generators, self._digests, strict=True):
            seed_generator(generator, (digest + seed) % _SEEDS)

    @property
    def changed(self) -> bool:
        """Whether one is in another state than when this object was made."""
        return [_digest_of(_state_of(each)) for each in self._generators] != self._digests


@contextmanager
def reading_held(generators: Sequence[Any], seed: int) -> Iterator[None]:
    """Context of a read in the script's own process: generators of the dataset draw by ``seed``, and are put back."""
    before = [_state_of(each) for each in generators]
    for generator, state in zip(generators, before, strict=True):
        seed_generator(generator, (_digest_of(state) + seed) % _SEEDS)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            _set_state_of(generator, state)
