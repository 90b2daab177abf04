"""Which prepared loaders are being iterated, and what their current batch holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from drivetrain.data.plan import Rows


@dataclass(slots=True)
class BatchInfo:
    """The batch that a loader yielded last.

    Args:
        loader: the prepared loader.
        rows: what the global batch holds; ``None`` where only the loader's owner knows (already sharded data).
        dp_rank: this process's data-parallel coordinate.
        index: number of the batch within its epoch as this pass sees it, from 0.
        is_last: no batch follows for this rank.
        serial: changes with every batch that any loader yields.
        nominal_rows: the batch size of one rank, 0 where there is none.
    """

    loader: Any
    rows: Rows | None
    dp_rank: int
    index: int
    is_last: bool
    serial: int
    nominal_rows: int = 0

    @property
    def local_rows(self) -> int | None:
        """Rows that this rank loaded, repeated ones included."""
        return None if self.rows is None else self.rows.loaded[self.dp_rank]

    @property
    def rows_per_rank(self) -> tuple[int, ...] | None:
        """Rows that count, by coordinate."""
        return None if self.rows is None else self.rows.real

    @property
    def global_rows_real(self) -> int | None:
        """Rows that count, over all ranks."""
        return None if self.rows is None else self.rows.total

    @property
    def padded(self) -> bool:
        """Some rank's batch holds repeated rows."""
        return self.rows is not None and self.rows.padded


@final
class ActiveLoaders:
    """The loaders of one accelerator that are inside an iteration; the one that yielded last is the current one.

    A loader is active from its first batch until its iteration ends, is left by ``break`` or is broken by an exception;
    the loader around it is then current again.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[object, BatchInfo]] = []
        self._serial = 0
        self._registered = 0

    @property
    def current(self) -> BatchInfo | None:
        """The current batch, ``None`` outside of every loop."""
        return self._entries[-1][1] if self._entries else None

    @property
    def loaders(self) -> list[Any]:
        """Loaders being iterated, the current one last."""
        return [info.loader for _, info in self._entries]

    @property
    def last_batch(self) -> bool:
        """The current batch is its loader's last on this rank; ``False`` outside of every loop."""
        return bool(self._entries) and self._entries[-1][1].is_last

    def is_last_batch(self) -> bool:
        """As :attr:`last_batch`."""
        return self.last_batch

    def batch_serial(self) -> int:
        """A number that differs from batch to batch; 0 outside of every loop."""
        return self._entries[-1][1].serial if self._entries else 0

    def state(self) -> tuple[int, bool]:
        """``(batch_serial(), is_last_batch())`` in one call, for each micro-batch of the training loop."""
        if not self._entries:
            return 0, False
        info = self._entries[-1][1]
        return info.serial, info.is_last

    def next_serial(self) -> int:
        """A new number for a batch about to be yielded."""
        self._serial += 1
        return self._serial

    def register(self) -> int:
        """Number of a newly prepared loader, so that loaders of one run shuffle independently."""
        self._registered += 1
        return self._registered - 1

    def show(self, token: object, info: BatchInfo) -> None:
        """Make this the current batch; ``token`` stands for the iteration it comes from."""
        if not self._entries or self._entries[-1][0] is not token:
            self.leave(token)
            self._entries.append((token, info))
        else:
            self._entries[-1] = (token, info)

    def leave(self, token: object) -> None:
        """The iteration has ended, however."""
        self._entries = [entry for entry in self._entries if entry[0] is not token]
