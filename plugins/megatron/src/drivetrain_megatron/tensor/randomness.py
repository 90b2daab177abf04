"""Draws random numbers that differ between the ranks of the axis ``tp``, without a second generator.

Every rank of the axis has the same state of the default generator, so that replicated tensors draw the same numbers.
For a part of a tensor the generator is moved to a stream of the rank's own for one operation and then on to where it
is on every rank. The stream is a function of the default generator's state: a checkpoint needs no more than that
state, and an activation that is computed again under ``torch.utils.checkpoint`` draws what it drew before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drivetrain_megatron.tensor.collectives import Ring

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: seeds of neighbouring ranks share no bits.
_SEEDS = 1 << 63
_numpy = np.random


@contextmanager
def own_stream(ring: Ring, part: Tensor) -> Iterator[None]:
    """Inside, the default generator of the part's device draws numbers that belong to this rank. Not collective."""
    if part.device.type == "meta" or isinstance(part, FakeTensor):
        yield
        return
    if part.device.type == "cpu":
        seed = int(torch.randint(_SEEDS - 1, (1,)).item())
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(_seed_of(seed, ring.rank))
        try:
            yield
        finally:
            torch.set_rng_state(state)
        return
    # Seed and offset of a counter-based generator are known on the host: nothing waits for the device.
    index = torch.accelerator.current_device_index() if part.device.index is None else part.device.index
    generator = torch.get_device_module(part.device).default_generators[index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_seed_of(seed, ring.rank))
    generator.set_offset(offset)
    try:
        yield
    finally:
        generator.manual_seed(seed)
        # A kernel moves the offset by at most four per element; the whole tensor bounds every rank's part.
        generator.set_offset(offset + 4 * (part.numel() * ring.size // 4 + ring.size + 1))


def start_alike(ring: Ring, kind: str) -> None:
    """Give every rank of the axis the first one's random state: Python's, numpy's, torch's, the device's.

    Collective over the axis.

    Args:
        ring: its ranks.
        kind: type of their devices.
    """
    if ring.group is None:
        return
    module = None if kind == "cpu" else torch.get_device_module(kind)
    on_device = None if module is None else module.get_rng_state()
    here: list[Any] = [(random.getstate(), _numpy.get_state(), torch.get_rng_state(), on_device)]
    dist.broadcast_object_list(here, group=ring.group, group_src=0)
    python, numpys, cpu, device = here[0]
    random.setstate(python)
    _numpy.set_state(numpys)
    torch.set_rng_state(cpu)
    if module is not None:
        module.set_rng_state(device)


def _seed_of(seed: int, rank: int) -> int:
    return (seed + (rank + 1) * _MIX) % _SEEDS
