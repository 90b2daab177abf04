"""Synchronises the buffers of a model over the data-parallel ranks, from the first of them.

A batch norm's running statistics follow the batches of its own rank. An evaluation has to use the same ones on every
rank, and a checkpoint those of one rank. When they are synchronised depends on the engine: where forward is collective
(parameters in shards), before the first evaluation after training, which costs nothing in a training step; elsewhere
with the backward that closes an accumulation window, the last point that every rank is sure to reach. Ranks may then
evaluate different numbers of batches, or only the main process does.

A forward that writes what it computes from a batch to a buffer (a running mean, a queue of features, a count of tokens)
computes it from one rank's samples, so that training is not that of one process. A comparison of values warns of it,
once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
        self._rounds = 0
        """Windows, or training forwards with `together`."""
        self._said = topology.rank != 0
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
        """Synchronise before a forward of the model if needed; call it before each one, with or without gradients.

        With ``together`` collective over all ranks in the first evaluation after training. Otherwise only if training
        forwards ran since the last window was closed, as by ``update_bn``; the main process then waits some seconds
        for the other ranks, and continues without those that do not evaluate.
        """
        if not self.matter:
            return
        if self._module.training:
            if self._together:
                self._look()
            self._changed = True
            if self._each_forward:
                self.agree()
                self._changed = True
        elif self._changed and not self._apart:
            if self._late is None or self._late.called_by_all(self._windows, log_call("evaluation")):
                self.agree()
            self._changed = False

    def window_closed(self) -> None:
        """Synchronise after a backward that reduces gradients. Collective over the data-parallel ranks."""
        self._windows += 1
        if self.matter and not self._together and not self._apart:
            self._look()
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

    def _look(self) -> None:
        """Warn once of buffers that differ between ranks. Collective over the data-parallel ranks.

        In rounds 1, 2, 4, 8, ...: it waits for the device, and what a forward writes it writes in most steps.
        """
        self._rounds += 1
        if self._apart or self._rounds & (self._rounds - 1):
            return
        names = {id(part): name for name, part in self._module.named_modules()}
        found = [
            (f"{names[id(part)]}.{name}".removeprefix("."), buffer)
            for part in self._module.modules()
            if not isinstance(part, _BatchNorm)  # said in `prepare`
            for name, buffer in part.named_buffers(recurse=False)
            if not buffer.is_meta
        ]
        if not found:
            return
        mine = torch.stack([_sums(buffer).to(self._topology.device) for _, buffer in found])
        first = mine.clone()
        collectives.broadcast_in_place([first], self._topology)
        differ = ~torch.isclose(mine, first, rtol=_ROUNDING, atol=0.0, equal_nan=True).all(1)
        differ = collectives.all_reduce(differ.float(), "max", self._topology)
        if not self._said and bool(differ.any()):
            self._said = True
            named = [name for (name, _), one in zip(found, differ.tolist(), strict=True) if one]
            logger.warning(
                "%s writes to buffers in forward (%s), and each of %d data-parallel ranks computes them from its own "
                "samples. All ranks evaluate with those of the first, which are in checkpoints too, and training is "
                "not that of one process with the global batch. In forward, gather what is written over the ranks "
                "(torch.distributed.all_gather), so that every rank writes the same.",
                type(self._module).__name__,
                ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else ""),
                self._topology.dp_size,
            )

    def agree(self) -> None:
        """Broadcast the first data-parallel rank's values, if the model was trained since the last time.

        Collective over the data-parallel ranks.
        """
        if self.matter and self._changed:
            self._changed = False
            own = (part for part in self._module.modules() if not isinstance(part, Synchronised))
            collectives.broadcast_in_place([each for part in own for each in persistent_buffers(part)], self._topology)


_ROUNDING = 1e-5
"""Tolerance of a buffer's sums: differences that other kernels or orders of summation explain."""


def _sums(buffer: Tensor) -> Tensor:
    """Two numbers that differ where values do, values that changed places too."""
    flat = buffer.detach().abs().double().flatten() if buffer.is_complex() else buffer.detach().double().flatten()
    return torch.stack([flat.sum(), flat @ torch.linspace(1, 2, flat.numel(), dtype=flat.dtype, device=flat.device)])


def persistent_buffers(part: nn.Module) -> Iterator[Tensor]:
    """This module's own buffers that are state, and have values here."""
    for name, buffer in part.named_buffers(recurse=False):
        # torch has no public accessor for it.
        if name not in part._non_persistent_buffers_set and not buffer.is_meta:  # noqa: SLF001
            yield buffer
