"""Measures the time of each part of a model: a few forwards with real values before the cut, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.api import UsageError

_ROUNDS = 3
"""Number of forwards. The first warms up caches and allocators; of the others the minimum of each part is used."""


@torch.no_grad()
def seconds(
    module: nn.Module, forward: Callable[[], Any], candidates: Sequence[str], device: torch.device
) -> Sequence[float]:
    """Seconds until the first of these modules is called, between their calls, and after the last one's began.

    The mean over all ranks, so that all decide alike. Modules may lie in host memory: each goes to the device for its
    own forward, which is not counted. The caller undoes what forwards change. Collective over all ranks.

    Args:
        module: whole.
        forward: calls it.
        candidates: names, in the order of their calls; each is called once.
        device: where it is timed.

    Raises:
        UsageError: it cannot be run module by module.
    """
    clock = _Clock(device)
    with ExitStack() as stack:
        if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
            stack.enter_context(_visiting(module, clock, device))
        for name in candidates:
            stack.callback(module.get_submodule(name).register_forward_pre_hook(clock.at_call).remove)
        rounds = []
        for _ in range(_ROUNDS):
            clock.start()
            try:
                forward()
            except RuntimeError as problem:
                raise UsageError(
                    f"the time of {type(module).__name__}'s parts cannot be measured: {problem}",
                    cure="Write megatron.balance: bytes, or megatron.split_points.",
                ) from problem
            rounds.append(clock.mark())
    shortest = [min(times) for times in zip(*rounds[1:], strict=True)]
    mean = torch.tensor(shortest, dtype=torch.float32, device=device)
    dist.all_reduce(mean)
    found: list[float] = (mean / dist.get_world_size()).tolist()
    return found


class _Clock:
    """Seconds between marks, without what is excluded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        self._times: list[float] = []
        self._last = self._now()

    def mark(self) -> list[float]:
        """All times until now."""
        now = self._now()
        self._times.append(now - self._last)
        self._last = now
        return self._times

    def at_call(self, module: nn.Module, inputs: Any) -> None:
        """A mark, as a hook."""
        self.mark()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        began = self._now()
        yield
        self._last += self._now() - began

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def _visiting(module: nn.Module, clock: _Clock, device: torch.device) -> Iterator[None]:
    """Each module's own tensors are on the device while its forward runs."""
    handles: list[RemovableHandle] = []
    home: dict[int, Tensor] = {}

    def come(part: nn.Module, _: Any) -> None:
        with clock.excluded():
            for tensor in _own(part):
                home.setdefault(id(tensor), tensor.data)
                tensor.data = tensor.data.to(device)

    def leave(part: nn.Module, *_: Any) -> None:
        with clock.excluded():
            for tensor in _own(part):
                tensor.data = home.pop(id(tensor), tensor.data)

    for part in module.modules():
        handles.append(part.register_forward_pre_hook(come))
        handles.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
