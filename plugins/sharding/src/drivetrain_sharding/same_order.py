"""Compares an engine's first collectives over the ranks, and raises where they differ instead of hanging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from drivetrain.api import Topology, UnsupportedError

_serial = count()
"""Numbers the users of the store, which are made in the same order on every rank."""

_NAMES_SHOWN = 4
"""Names of parts in a message."""


@final
class SameOrder:
    """The first collectives of one engine. Made in the same order on every rank.

    Ranks exchange their next operation through the process group's store instead of a collective, since another one may
    be running on some of them. On one process nothing is compared.

    Args:
        topology: the job.
        number: how many calls of :meth:`meet` compare; later ones must not be made.
    """

    def __init__(self, topology: Topology, number: int) -> None:
        self._rank, self._size = topology.rank, topology.world_size
        self._prefix = f"same_order/{next(_serial)}"
        self._done, self._number = 0, number if self._size > 1 else 0

    @property
    def over(self) -> bool:
        """Whether enough has been compared."""
        return self._done >= self._number

    def meet(self, action: str, parts: Iterable[str] = ()) -> None:
        """Wait for all ranks and compare their next operation. Collective over all ranks.

        Args:
            action: ``gathers the parameters of heads.low``.
            parts: names of what it is done to, in order.

        Raises:
            UnsupportedError: another rank is about to do something else; on every rank, in the same words.
        """
        store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
        keys = [f"{self._prefix}/{self._done}/{rank}" for rank in range(self._size)]
        self._done += 1
        store.set(keys[self._rank], "\n".join((action, *parts)))
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        words = [each.decode().split("\n") for each in found]
        other = next((rank for rank in range(self._size) if words[rank] != words[0]), None)
        if other is None:
            return
        # The process that hosts the store may be the first to end.
        store.set(f"{self._prefix}/seen/{self._rank}", "")
        if self._rank == 0:
            with contextlib.suppress(dist.DistError):
                store.wait([f"{self._prefix}/seen/{rank}" for rank in range(self._size)], timedelta(seconds=5))
        raise UnsupportedError(
            f"rank 0 {_what(words[0], words[other])}, while rank {other} {_what(words[other], words[0])}: ranks have "
            "not run the same submodules, and the engine would wait without end or end the process",
            cure="Run every submodule on every rank, in the same order, and choose by a mask afterwards what counts "
            "(`torch.where(high[:, None], heads.high(x), heads.low(x))`, or weight 0 in the loss where a rank has no "
            "samples for a head), or use distributed_type: ddp.",
        )


def _what(mine: Sequence[str], others: Sequence[str]) -> str:
    """An action, with those of its parts that the other rank's action does not have."""
    action, *parts = mine
    only = [part for part in parts if part not in others]
    if not only:
        return action
    more = f" and {len(only) - _NAMES_SHOWN} more" if len(only) > _NAMES_SHOWN else ""
    return f"{action}, {', '.join(only[:_NAMES_SHOWN])}{more} among them"
