"""Ranks that ask for a whole model: all of them at once, or one alone while the others wait at a barrier.

A model that lies on several ranks can only be told by all of them. Scripts ask for it everywhere, as they should, or
under ``if accelerator.is_main_process:`` before everybody meets again. Who comes is found out through the process
group's store before anything collective is begun, so that a rank alone gets an error and no hang.
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
"""How long the main process waits for the others. They computed a batch with it a moment ago."""

_NOT_ALONE = "*"
"""Before what is asked of ranks that must call it themselves."""

_POLL_SECONDS = 0.0002, 0.01
"""Shortest and longest pause between two looks at the store."""


@final
class Meeting:
    """Made in the same order on every rank of a job.

    Args:
        topology: the job.
        timeout_seconds: how long a rank waits for the main process, which may be busy with what it does alone.
    """

    def __init__(self, topology: Topology, timeout_seconds: float | None = None) -> None:
        self._rank, self._size = topology.rank, topology.world_size
        self._timeout = timeout_seconds or default_pg_timeout.total_seconds()
        self._number = self._barriers = 0
        self._prefixed: Any = None

    def come(self, call: str, asked: str, cure: str, *, alone: bool = True) -> None:
        """Wait until every rank is here. Collective over all ranks.

        Args:
            call: what the script calls, for the error.
            asked: the same on every rank: what :meth:`wait` hands to the ranks that wait at a barrier.
            cure: what to write instead.
            alone: ranks that wait at a barrier count as here, and do what is asked.

        Raises:
            UsageError: the others do not come; nothing has been changed or sent.
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
            # Others ask for something else.
            self._store.compare_set(f"{number}/decision", "", "late")
            here = 1
        raise UsageError(
            f"{call} was called on {here} of {self._size} processes, and needs the parts of the model on all of them; "
            "nothing was changed, and training can go on",
            cure=cure,
        )

    def wait(self, serve: Callable[[str], None]) -> None:
        """Wait until every rank is at this barrier; meanwhile do what ranks that are not here ask. Collective.

        Args:
            serve: given what was asked, joins in.

        Raises:
            DrivetrainError: somebody does not come.
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
            # Everybody is past the one before the last.
            self._store.delete_key(f"barrier/{self._barriers - 2}")

    def _following(self) -> int:
        """The number of the next occasion; those at which others gave up are past."""
        self._number += 1
        while self._store.check([f"{self._number}/decision"]):
            self._number += 1
        return self._number

    def _asked(self) -> str | None:
        """What ranks that are not at the barrier ask of those that are."""
        number = self._number + 1
        while self._store.check([f"{number}/decision"]):
            number += 1
        if not self._store.check([f"{number}/asked"]):
            return None
        asked: str = self._store.get(f"{number}/asked").decode()
        return None if asked.startswith(_NOT_ALONE) else asked

    def _arrive(self, number: int) -> int:
        """Come to an occasion. Whether all have come (-1), else how many have."""
        here, decision = f"{number}/here", f"{number}/decision"
        deadline = time.monotonic() + (PATIENCE_SECONDS if self._rank == 0 else self._timeout)
        pause = _POLL_SECONDS[0]
        count = self._store.add(here, 1)
        while count < self._size and time.monotonic() < deadline and not self._store.check([decision]):
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            count = self._store.add(here, 0)
        word = "all" if count >= self._size else "late"
        # The first word counts: who comes after it reads what was decided.
        return -1 if self._store.compare_set(decision, "", word) == b"all" else int(count)

    @property
    def _store(self) -> Any:
        if self._prefixed is None:
            store = distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way to it)
            self._prefixed = dist.PrefixStore("megatron/meeting", store)  # type: ignore[attr-defined]
        return self._prefixed
