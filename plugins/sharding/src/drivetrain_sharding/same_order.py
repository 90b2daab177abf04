"""Compares an engine's first collectives over the ranks, and raises where they differ instead of hanging."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from drivetrain.api import Topology, UnsupportedError

_serial = count()
"""Numbers the users of the store, which are made in the same order on every rank."""

_NAMES_SHOWN = 4
"""Names of parts in a message."""

_PAUSE_SECONDS = 0.0002, 0.02
"""Shortest and longest pause between two looks of a rank that waits."""

_LOOK_SECONDS = 0.5
"""Between two looks whether the ranks that are waited for wait in another engine."""

_AHEAD_SECONDS = 2.0
"""Part of a time-out that is left when a rank stops waiting."""

_LOOKS = 4
"""Number of polls after which a rank stops waiting for the positions of others."""

_LIBRARIES = ("torch.", "deepspeed.", "drivetrain.", "drivetrain_")

_completed: dict[str, int] = {}
"""Number of operations that all ranks have reached, by engine."""


@final
class SameOrder:
    """The first collectives of one engine. Made in the same order on every rank.

    Ranks exchange their next operation through the process group's store instead of a collective, since another one may
    be running on some of them. On one process nothing is compared.

    Args:
        topology: the job.
        number: how many calls of :meth:`meet` compare; later ones must not be made.
        model: the name of its class, for messages.
    """

    def __init__(self, topology: Topology, number: int, model: str) -> None:
        self._rank, self._size, self._model = topology.rank, topology.world_size, model
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
            UnsupportedError: another rank is about to do something else, in this engine or in another one; on every
                rank.
        """
        store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
        keys = [f"{self._prefix}/{self._done}/{rank}" for rank in range(self._size)]
        store.set(keys[self._rank], "\n".join((action, *parts)))
        self._wait(store, keys, action)
        self._done += 1
        _completed[self._prefix] = self._done
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        words = [each.decode().split("\n") for each in found]
        other = next((rank for rank in range(self._size) if words[rank] != words[0]), None)
        if other is None:
            return
        self._let_all_see(store, self._prefix)
        raise UnsupportedError(
            f"rank 0 {_what(words[0], words[other])}, while rank {other} {_what(words[other], words[0])}: ranks have "
            "not run the same submodules, and the collectives of the engine would hang or fail",
            cure="Run every submodule on every rank, in the same order, and choose by a mask afterwards what counts "
            "(`torch.where(high[:, None], heads.high(x), heads.low(x))`, or weight 0 in the loss where a rank has no "
            "samples for a head), or use distributed_type: ddp.",
        )

    def _wait(self, store: Any, keys: Sequence[str], action: str) -> None:
        """Wait until every rank has reached this operation, and raise if one waits for this rank in another engine.

        A rank publishes its position before it polls the others. If it waits in an operation that this rank has not
        reached, both would wait for ever.

        Raises:
            UnsupportedError: a rank waits for this one elsewhere, or has not come within the time-out of the process
                group.
        """
        begun, seconds = time.monotonic(), store.timeout.total_seconds()
        # A moment before the ranks that wait in another call reach theirs, and end the job with less to say.
        limit = max(seconds / 2, seconds - _AHEAD_SECONDS)
        pause, look, looks = _PAUSE_SECONDS[0], begun + _LOOK_SECONDS, 0
        while not store.check(list(keys)):
            now = time.monotonic()
            if now - begun > limit:
                self._refuse_absence(store, keys, action, now - begun)
            if now > look:
                look, looks = now + _LOOK_SECONDS, looks + 1
                mine = f"in model {self._prefix.rpartition('/')[2]} ({self._model}) {action} at {_script_line()}"
                store.set(f"same_order/at/{self._rank}", f"{self._prefix}\n{self._done}\n{mine}")
                self._refuse_standstill(store, keys, last=looks > _LOOKS)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _refuse_absence(self, store: Any, keys: Sequence[str], action: str, waited: float) -> NoReturn:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {', '.join(absent)} have"
        raise UnsupportedError(
            f"rank {self._rank} {action} at {_script_line()} (model {self._model}), and {who} not come within "
            f"{waited:.0f} s",
            cure="Run the forward and backward of a model on every rank, in evaluation too, and not under "
            "`if accelerator.is_main_process:`: its parameters are gathered from all of them. Under "
            "distributed_type: ddp a rank may evaluate by itself.",
        )

    def _refuse_standstill(self, store: Any, keys: Sequence[str], *, last: bool) -> None:
        """Raise where a rank waits in another engine: once all ranks have said where they are, or at the last look."""
        said = {rank: f"same_order/at/{rank}" for rank in range(self._size)}
        found = {rank: store.get(key).decode().split("\n") for rank, key in said.items() if store.check([key])}
        waits = {
            rank: where for rank, (prefix, number, where) in found.items() if int(number) >= _completed.get(prefix, 0)
        }
        elsewhere = any(found[rank][0] != self._prefix for rank in waits)
        # Another rank may have gone on since, which it cannot before all have come here.
        if elsewhere and (last or len(waits) == self._size) and not store.check(list(keys)):
            # What ranks have said of these engines is void where a script goes on with others.
            _completed.update(dict.fromkeys([prefix for prefix, *_ in found.values()], sys.maxsize))
            self._refuse_apart(store, waits)

    def _refuse_apart(self, store: Any, waits: dict[int, str]) -> NoReturn:
        self._let_all_see(store, "same_order")
        first = waits[min(waits)]
        other = next(rank for rank in sorted(waits) if waits[rank] != first)
        raise UnsupportedError(
            f"rank {min(waits)} {first}, while rank {other} {waits[other]}: ranks call models in different orders, and "
            "would wait for each other without end",
            cure="Call the models, and their losses' backward, in the same order on every rank, or use "
            "distributed_type: ddp.",
        )

    def _let_all_see(self, store: Any, prefix: str) -> None:
        """Let the other ranks raise too: the process that hosts the store may be the first to end."""
        store.set(f"{prefix}/seen/{self._rank}", "")
        if self._rank == 0:
            with contextlib.suppress(dist.DistError):
                store.wait([f"{prefix}/seen/{rank}" for rank in range(self._size)], timedelta(seconds=5))


def _script_line() -> str:
    """``train.py:35``: the innermost line that is not of a library."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_LIBRARIES):
        frame = frame.f_back
    return "the script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _what(mine: Sequence[str], others: Sequence[str]) -> str:
    """An action, with those of its parts that the other rank's action does not have."""
    action, *parts = mine
    only = [part for part in parts if part not in others]
    if not only:
        return action
    more = f" and {len(only) - _NAMES_SHOWN} more" if len(only) > _NAMES_SHOWN else ""
    return f"{action}, {', '.join(only[:_NAMES_SHOWN])}{more} among them"
