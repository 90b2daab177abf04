"""Who comes to a call that is meant for every rank, where scripts are known to make it on the main process alone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from itertools import count
from typing import final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from drivetrain.distributed.watchdog import CURE, give_up
from drivetrain.errors import CollectiveMismatchError
from drivetrain.topology import Topology

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long the main process waits for the others the first time. They reduced gradients with it a moment ago."""
LATER_PATIENCE_SECONDS = 1.0
"""The same once they have failed to come."""

_serial = count()


@final
class Attendance:
    """Finds out before a collective whether all ranks are in it, through the process group's store.

    A rank that is not on its way is blocked in another collective, waiting for the main process; so the main process
    decides, and a rank that comes too late reads the decision. Made in the same order on every rank.

    Args:
        topology: the job.
        call: what is called, for the sentence that says who was missing.
        lost: what is lost when the main process goes on alone.
    """

    def __init__(self, topology: Topology, call: str, lost: str) -> None:
        self._rank, self._others = topology.rank, topology.world_size - 1
        self.call, self._lost = call, lost
        self._prefix = f"attendance/{next(_serial)}"
        self._times: Counter[int] = Counter()
        self._absent = False

    def all_come(self, step: int, site: str) -> bool:
        """Whether all ranks are in this call; ``False`` on the main process when it is to go on alone.

        ``False`` on another rank means that the main process went on without it. Costs a few round trips to the store.

        Args:
            step: a number on which the ranks agree, and which seldom recurs.
            site: ``save_state at train.py:88``.

        Raises:
            CollectiveMismatchError: the main process does not come within the process group's time-out, or has ended.
        """
        if not self._others:
            return True
        store = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
        occasion = f"{self._prefix}/{step}/{self._times[step]}"
        self._times[step] += 1
        arrived, decision = f"{occasion}/arrived", f"{occasion}/decision"
        if self._rank != 0:
            store.add(arrived, 1)
            try:
                return bool(store.get(decision) == b"all")
            except dist.DistError as error:
                give_up(site)
                raise CollectiveMismatchError(
                    f"{site}: the main process has not come", whose=f"rank {self._rank}", cure=CURE
                ) from error
        deadline = time.monotonic() + (LATER_PATIENCE_SECONDS if self._absent else PATIENCE_SECONDS)
        pause = 0.0005
        while (here := store.add(arrived, 0)) < self._others and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        everyone = bool(here >= self._others)
        store.set(decision, "all" if everyone else "main")
        if not everyone and not self._absent:
            self._absent = True
            logger.warning(
                "%s: %d of %d processes did not come within %g s; %s. Call it on every process, not under "
                "`if accelerator.is_main_process:`.",
                self.call,
                self._others - here,
                self._others + 1,
                PATIENCE_SECONDS,
                self._lost,
            )
        return everyone
