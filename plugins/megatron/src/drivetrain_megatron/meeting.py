"""Rendezvous of ranks for gathering a sharded state dict.

Gathering needs every rank. Either all ranks call it, or the main process calls it under
``if accelerator.is_main_process:`` while the others wait at a barrier, in which they take part in the gathering. Ranks
register in the process group's store before the first collective starts, so that a call on some ranks raises instead of
hanging.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from drivetrain.api import DrivetrainError, Topology, UsageError

PATIENCE_SECONDS = 20.0
"""Timeout for the other ranks. They have just computed a batch together with the caller."""

_NOT_ALONE = "*"
"""Prefix of requests that ranks waiting at a barrier do not serve."""

_POLL_SECONDS = 0.0002, 0.01
"""Shortest and longest pause between two looks at the store."""


@final
class Meeting:
    """A rendezvous; ranks must construct them in the same order.

    Args:
        topology: the job.
        timeout_seconds: timeout of barriers; the main process may run code of its own before them.
    """

    def __init__(self, topology: Topology, timeout_seconds: float | None = None) -> None:
        self._rank, self._size = topology.rank, topology.world_size
        self._timeout = timeout_seconds or default_pg_timeout.total_seconds()
        self._number = self._barriers = 0
        self._prefixed: Any = None

    def come(self, call: str, asked: str, cure: str, *, alone: bool = True) -> None:
        """Wait until every rank takes part. Collective over all ranks.

        Args:
            call: what the script calls, for the error.
            asked: the request, the same on every rank; :meth:`wait` passes it to the ranks that wait at a barrier.
            cure: what to write instead.
            alone: ranks that wait at a barrier take part and serve the request.

        Raises:
            UsageError: other ranks do not take part; nothing has been changed or sent.
        """
        if self._size == 1:
            return
        number = self._following()
        asked = asked if alone else _NOT_ALONE + asked
        if self._store.compare_set(f"{number}/asked", "", asked) == asked.encode():
            here = self._arrive(number)
            if here < 0:
                return
        else:
            # Other ranks have made another request.
            self._store.compare_set(f"{number}/decision", "", "late")
            here = 1
        raise UsageError(
            f"{call} was called on {here} of {self._size} processes, and needs the parts of the model on all of them; "
            "nothing was changed, and training can go on",
            cure=cure,
        )

    def wait(self, serve: Callable[[str], None]) -> None:
        """Wait until every rank reaches this barrier; meanwhile serve requests of ranks that have not. Collective.

        Args:
            serve: takes part in a request.

        Raises:
            DrivetrainError: a rank does not reach the barrier in time.
        """
        self._barriers += 1
        here = f"barrier/{self._barriers}"
        deadline, pause = time.monotonic() + self._timeout, _POLL_SECONDS[0]
        count = self._store.add(here, 1)
        while count < self._size:
            if (asked := self._asked()) is not None:
                if self._arrive(self._following()) < 0:
                    serve(asked)
            elif time.monotonic() > deadline:
                raise DrivetrainError(
                    f"{self._size - count} of {self._size} processes did not reach a barrier in {self._timeout:g} s",
                    cure="Call wait_for_everyone and end_training on every process.",
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS[1])
            count = self._store.add(here, 0)
        if self._rank == 0 and self._barriers > 2:
            # Every rank has left the barrier before the last.
            self._store.delete_key(f"barrier/{self._barriers - 2}")

    def _following(self) -> int:
        """Return the number of the next request that is not decided yet."""
        self._number += 1
        while self._store.check([f"{self._number}/decision"]):
            self._number += 1
        return self._number

    def _asked(self) -> str | None:
        """Return the request of ranks that have not reached the barrier, if there is one."""
        number = self._number + 1
        while self._store.check([f"{number}/decision"]):
            number += 1
        if not self._store.check([f"{number}/asked"]):
            return None
        asked: str = self._store.get(f"{number}/asked").decode()
        return None if asked.startswith(_NOT_ALONE) else asked

    def _arrive(self, number: int) -> int:
        """Register for a request. Returns -1 if all ranks take part, else their number."""
        here, decision = f"{number}/here", f"{number}/decision"
        deadline = time.monotonic() + (PATIENCE_SECONDS if self._rank == 0 else self._timeout)
        pause = _POLL_SECONDS[0]
        count = self._store.add(here, 1)
        while count < self._size and time.monotonic() < deadline and not self._store.check([decision]):
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            count = self._store.add(here, 0)
        word = "all" if count >= self._size else "late"
        # The first decision counts: later ranks read it.
        return -1 if self._store.compare_set(decision, "", word) == b"all" else int(count)

    @property
    def _store(self) -> Any:
        if self._prefixed is None:
            store = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
            self._prefixed = dist.PrefixStore("megatron/meeting", store)  # type: ignore[attr-defined]
        return self._prefixed
