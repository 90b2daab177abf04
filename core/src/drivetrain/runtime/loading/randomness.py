"""Random state of its own for code that decides the order of samples, so that every rank decides the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import Sampler

from drivetrain.data.order import derive_seed


@final
class PrivateRandom:
    """Python's, numpy's and torch's (CPU) global random state, swapped in on entry and out on exit.

    What runs inside sees a stream that depends on the seed alone, across any number of entries. What runs outside does
    not notice it, save for one thing: the second of a pair of normal numbers that numpy's legacy functions keep for
    the next call is drawn anew after an entry. (Numpy's generators are exchanged rather than copied, at a hundredth of
    the cost; an entry costs about ten microseconds.)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        outside = _capture()
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        self._inside = _capture()
        _restore(outside)
        self._outside: tuple[Any, ...] = ()
        self._bits: Any = None
        self._outside_bits: Any = None

    def __enter__(self) -> None:
        self._outside = _capture()
        _restore(self._inside)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if self._bits is None:
                self._bits = _legacy_generator(numpy, self._seed)
            self._outside_bits = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(self._bits)

    def __exit__(self, *_: object) -> None:
        self._inside = _capture()
        _restore(self._outside)
        if self._outside_bits is not None:
            sys.modules["numpy"].random.set_bit_generator(self._outside_bits)
            self._outside_bits = None


def _legacy_generator(numpy: Any, seed: int) -> Any:
    """A bit generator that gives the numbers that ``numpy.random.seed(seed)`` would."""
    _, key, position, *_ = numpy.random.RandomState(seed % 2**32).get_state()
    bits = numpy.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
    return bits


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's (CPU) global random state; numpy only where it is loaded."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _capture() -> tuple[Any, ...]:
    return random.getstate(), torch.default_generator.get_state()


def _restore(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.default_generator.set_state(state[1])


def generators(sampler: Any) -> Iterator[Any]:
    """Random generators that a sampler holds, and those of samplers inside it, in the order of its attributes."""
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if _is_generator(value):
            yield value
        elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            yield from generators(value)


def reseed(sampler: Any, seed: int) -> None:
    """Give every generator that a sampler holds a seed of its own."""
    for index, generator in enumerate(generators(sampler)):
        own = derive_seed("generator", seed, index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own % 2**32)


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
