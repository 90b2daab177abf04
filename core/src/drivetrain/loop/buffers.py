"""Synchronises the buffers of a model over the data-parallel ranks, from the first of them.

A batch norm's running statistics follow the batches of its own rank. An evaluation has to use the same ones on every
rank, and a checkpoint those of one rank. When they are synchronised depends on the engine: where forward is collective
(parameters in shards), before the first evaluation after training, which costs nothing in a training step; elsewhere
with the backward that closes an accumulation window, the last point that every rank is sure to reach. Ranks may then
evaluate different numbers of batches, or the main process alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drivetrain.distributed import collectives
from drivetrain.distributed.watchdog import MainProcessOnlyCall, log_call
from drivetrain.loop.batch_norm import Synchronised
from drivetrain.topology import Topology

logger = logging.getLogger(__name__)


class Buffers:
    """The persistent buffers of one model. Made in the same order on every rank.

    Whether a buffer has changed is unknown: writes of batch norms and through ``.data`` do not change a tensor's
    version counter. A model is therefore assumed to have changed them in each training forward. Excluded are
    non-persistent buffers and those of converted batch norms, which are the same on every rank already.

    Args:
        module: the module.
        topology: the job. Buffers are not synchronised along other axes than the data-parallel ones.
        together: every forward is collective over all ranks, in evaluation too.
        each_forward: with ``together``: before training forwards too.
    """

    def __init__(
        self, module: nn.Module, topology: Topology, *, together: bool = False, each_forward: bool = False
    ) -> None:
        self._module, self._topology = module, topology
        self._together, self._each_forward = together, each_forward
        self.matter = topology.dp_size > 1 and any(True for _ in module.buffers())
        """They can differ from rank to rank; if not, the other methods do nothing."""
        self._changed = False
        self._apart = False
        self._windows = 0
        self._late: MainProcessOnlyCall | None = None
        if topology.dp_size > 1 and not together:
            lost = "they evaluate with statistics of their own"
            self._late = MainProcessOnlyCall(topology, "an evaluation after training forwards without a backward", lost)

    @staticmethod
    @torch.no_grad()
    def place(module: nn.Module, topology: Topology) -> None:
        """Move buffers to the device, with rank 0's values. Collective over all ranks."""
        for buffer in module.buffers():
            buffer.data = buffer.data.to(topology.device)
            if topology.world_size > 1:
                buffer.data = collectives.broadcast(buffer.data, 0, topology)

    def registered(self) -> None:
        """Handle the registration of a buffer, or of a module that may have some. Not collective."""
        self.matter = self._topology.dp_size > 1

    def before_forward(self) -> None:
        """To be called before each forward of the model, with or without gradients.

        With ``together`` collective over all ranks in the first evaluation after training. Else only where training
        forwards were run since the last window was closed, as by ``update_bn``; the main process then waits some
        seconds for the others, and goes on without those that do not evaluate.
        """
        if not self.matter:
            return
        if self._module.training:
            self._changed = True
            if self._each_forward:
                self.agree()
                self._changed = True
        elif self._changed and not self._apart:
            if self._late is None or self._late.called_by_all(self._windows, log_call("evaluation")):
                self.agree()
            self._changed = False

    def window_closed(self) -> None:
        """To be called after each backward that reduces gradients. Collective over the data-parallel ranks."""
        self._windows += 1
        if self.matter and not self._together and not self._apart:
            # The script may have trained without calling the model itself.
            self._changed = self._changed or self._module.training
            self.agree()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context in which ranks may run out of batches at different times; synchronises at the end. Collective."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False
        if self.matter and not self._together:
            self._changed = True
            self.agree()

    def agree(self) -> None:
        """Broadcast the first data-parallel rank's values, if the model was trained since the last time.

        Collective over the data-parallel ranks.
        """
        if self.matter and self._changed:
            self._changed = False
            own = (part for part in self._module.modules() if not isinstance(part, Synchronised))
            collectives.broadcast_in_place([each for part in own for each in persistent_buffers(part)], self._topology)


def persistent_buffers(part: nn.Module) -> Iterator[Tensor]:
    """This module's own buffers that are state, and have values here."""
    for name, buffer in part.named_buffers(recurse=False):
        # torch has no public accessor for it.
        if name not in part._non_persistent_buffers_set and not buffer.is_meta:  # noqa: SLF001
            yield buffer
