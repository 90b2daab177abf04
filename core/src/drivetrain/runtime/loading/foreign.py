"""Loaders that are not torch's but carry their own state: every rank runs one and keeps each of its batches in turn."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, final

from drivetrain.data.order import StreamedOrder
from drivetrain.data.plan import Cut, plan_rounds, round_rows
from drivetrain.data.position import Identity
from drivetrain.errors import UsageError
from drivetrain.runtime.loading.source import Item, Start, num_rows


@final
class ForeignSource:
    """Batches of an object with ``__iter__``, ``state_dict`` and ``load_state_dict``.

    Its state is taken after every global batch, before the next is read, and saved with the position. A loader that is
    marked as already sharded has a state on each rank.

    Args:
        loader: the user's.
        cut: how batches are shared out; ``batch_size`` is 0.
        dp_rank: whose batches; ``None`` reads for all ranks.
        shares: see :class:`~drivetrain.data.position.Identity`.
    """

    num_streams = 1

    def __init__(self, loader: Any, cut: Cut, dp_rank: int | None, *, shares: int) -> None:
        self.cut, self._loader, self._dp_rank, self._shares = cut, loader, dp_rank, shares
        self.round_units = cut.units

    def identity(self) -> Identity:
        length = len(self._loader) if hasattr(self._loader, "__len__") else None
        return Identity("batches", length=length, shares=self._shares)

    def open(self, start: Start) -> Generator[Item, None, None]:
        loader, wanted, read = self._loader, start.position.consumed, 0
        if callable(getattr(loader, "set_epoch", None)):
            loader.set_epoch(start.position.epoch)
        if start.mark is not None:
            read, state = start.mark
            if read > wanted:
                raise UsageError(
                    f"{type(loader).__name__} was restored after batch {read} and cannot go back to batch {wanted}",
                    cure="Leave skip_first_batches out: load_state restored the position.",
                )
            loader.load_state_dict(state)
        cut = replace(self.cut, even_batches=start.even_batches)
        # Batches are passed over without being kept, except the first, which may be needed to fill the last round.
        order = StreamedOrder(iter(loader), cut.dp_size)
        for batch_list, real in plan_rounds(order, cut, wanted - read):
            rows = round_rows([num_rows(batch) for batch in batch_list], real, cut.dp_size)
            mark = loader.state_dict()
            if self._dp_rank is None:
                yield Item(batch_list, rows, mark=mark)
            elif self._dp_rank < len(batch_list):
                yield Item(batch_list[self._dp_rank], rows, mark=mark)
            else:
                yield Item(None, rows, absent=True)
