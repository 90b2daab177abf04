"""Buffers are whole on every rank and change on their own there; rank 0's count when anybody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drivetrain.api import Topology, collectives


class Buffers:
    """A module's buffers. Rank 0's are given to all before evaluation and before a state is read.

    Whether a buffer has changed cannot be known: batch norms write to theirs past torch's count of writes.

    Args:
        module: the module.
        topology: the job.
        each_forward: before training forwards too.
    """

    def __init__(self, module: nn.Module, topology: Topology, *, each_forward: bool) -> None:
        self._module, self._topology, self._each_forward = module, topology, each_forward
        self.matter = topology.world_size > 1 and any(True for _ in module.buffers())
        """They can differ from rank to rank; if not, the other methods do nothing."""
        self._trained = False

    @staticmethod
    @torch.no_grad()
    def place(module: nn.Module, topology: Topology) -> None:
        """Move buffers to the device, with rank 0's values. Collective over all ranks."""
        for buffer in module.buffers():
            buffer.data = buffer.data.to(topology.device)
            if topology.world_size > 1:
                buffer.data = collectives.broadcast(buffer.data, 0, topology)

    def before_forward(self) -> None:
        """Collective over all ranks in the first evaluation after training."""
        if not self.matter:
            return
        if self._each_forward or not self._module.training:
            self.agree()
        self._trained = self._trained or self._module.training

    @torch.no_grad()
    def agree(self) -> None:
        """Give every rank rank 0's values, if the module was trained since the last time. Collective over all ranks."""
        if self.matter and self._trained:
            self._trained = False
            for buffer in self._module.buffers():
                buffer.copy_(collectives.broadcast(buffer, 0, self._topology))


def state_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Buffers that are state (a checkpoint keeps them), each with its module and name."""
    return [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set  # noqa: SLF001 (torch has no public word for it)
    ]


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Undo what a forward that runs a second time does to the module's state: statistics count a batch once."""
    before = [(part, name, buffer, buffer.clone()) for part, name, buffer in state_buffers(module)]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in before:
                setattr(part, name, buffer)
                buffer.copy_(value)
