"""Random numbers of a pipelined forward: one stream per stage; the script's generators advance as without stages.

A forward that draws nothing leaves every generator as it was. One that draws from torch's generators draws, on each
stage, from a stream derived from the script's state, and advances that state by one number: the numbers that one
process would draw for a batch cannot be derived from its micro-batches. Python's and numpy's numbers are what
decides about layers (stochastic depth): every micro-batch sees the same ones, and where all stages have drawn the same
of them the states end where one forward of the whole batch leaves them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from drivetrain_megatron.module_state import same_randomness

_numpy = np.random
_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: seeds of neighbouring ranks share no bits.
_SEEDS = 1 << 62


@dataclass
class Draws:
    """The generators that a forward draws from, on any stage; found in its first run.

    Attributes:
        known: there was a first run.
        torch: torch's generator of the CPU.
        device: that of the device.
        on_host: Python's global generator, or numpy's.
    """

    known: bool = False
    torch: bool = False
    device: bool = False
    on_host: bool = False


@contextmanager
def own_numbers(
    draws: Draws, stream: int, last: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[Callable[[], None]]:
    """A context in which this rank's stages run.

    Collective over the pipeline if ``draws`` is not known, or includes numbers of Python or numpy.

    Args:
        draws: of the passage that runs, the same on every rank; filled in the first time.
        stream: a number of this rank alone, of all ranks that pipelines run on.
        last: the rank of the last stage.
        group: the ranks of the pipeline.
        device: of this rank.

    Yields:
        A function to be called before each run of a stage.
    """
    there, host = _device_state(device), _host()
    follows_host = draws.on_host or not draws.known

    def begin() -> None:
        if follows_host:
            _set_host(host)

    with same_randomness(device):
        seed = int(torch.randint(_SEEDS, (1,)).item())
        if there is not None:
            seed += zlib.crc32(there.numpy().tobytes())
        torch.manual_seed((seed + (stream + 1) * _MIX) % _SEEDS)
        begun = None if draws.known else (torch.get_rng_state(), _device_state(device))
        yield begin
        end = _host()
        if begun is not None:
            moved = (_moved(begun[0], torch.get_rng_state()), _moved(begun[1], _device_state(device)))
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, (*moved, host_digest(end) != host_digest(host)), group=group)
            draws.torch, draws.device, draws.on_host = (any(kinds) for kinds in zip(*told, strict=True))
            draws.known = True
    if draws.torch:
        torch.randint(_SEEDS, (1,))
    if draws.device:
        torch.rand(1, device=device)
    if draws.on_host:
        ends = [end]
        dist.broadcast_object_list(ends, group=group, group_src=last)
        _set_host(ends[0])


def _moved(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and not torch.equal(one, other)


def _host() -> tuple[Any, Any]:
    return random.getstate(), _numpy.get_state()


def _set_host(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    _numpy.set_state(state[1])


def host_digest(state: tuple[Any, Any] | None = None) -> int:
    """Return a 32-bit hash of a state of Python's and numpy's generators; of the current one by default."""
    python, numpys = _host() if state is None else state
    words = [one.tobytes() if isinstance(one, np.ndarray) else one for one in numpys]
    return zlib.crc32(repr((python, words)).encode())


def _device_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(device) if device.index is not None else module.get_rng_state()
    return state.cpu()
