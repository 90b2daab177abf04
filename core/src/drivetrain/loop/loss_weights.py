"""Weighs losses that are over other rows than those of one evenly shared batch.

A window (:mod:`drivetrain.loop.window`) knows the weight of a mean over the rows of its batch. Ranks that share a batch
unevenly may also train on parts of it, on rows of no batch, and on batches that the script kept from an earlier loop;
which of these a loss is over is read from its graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.loop.loss import computes_with_data, outputs_below, rows_of_terms, targets_of_terms

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.data.kept_batches import KeptBatches
    from drivetrain.data.plan import Rows
    from drivetrain.loop.window import Window

_TERMS, _VIEWS = 16, 4
"""Kinds of terms of a loss that are looked at; and how often a loss may have each row of a batch, as in views of it."""


@final
class LossWeights:
    """Weights of losses by their own rows.

    Args:
        backend: the started backend.
        kept: uneven batches that the script still holds; ``None`` where no loader is prepared.
    """

    def __init__(self, backend: Backend, kept: KeptBatches | None) -> None:
        self._backend, self._kept = backend, kept
        self._dp_size, self._dp_rank = backend.topology.dp_size, backend.topology.dp_rank
        self._pipelined = backend.capabilities.pipelined
        self.joining = False
        """Ranks may make different numbers of backwards."""
        self._agreed: tuple[Rows, ...] | None = None
        """Uneven batches that losses outside of every loop may be over; ``None``: to be agreed upon."""

    def of(self, loss: Tensor, window: Window, *, closes: bool, by_items: bool) -> float | None:
        """The weight of a loss over other rows than those of an evenly shared batch; ``None``: the window's.

        Collective over the data-parallel ranks where they share the batch unevenly, and after a loop.

        Args:
            loss: of a micro-batch.
            window: of it.
            closes: its backward reduces gradients.
            by_items: it is a sum over items, or counted as one, so that no weight is no error.
        """
        rows, shares, kept = window.rows, window.shares, self._kept
        if window.after_loops:
            asks = self._dp_size > 1 and not self._pipelined and (closes or window.open) and not self.joining
            shares = self._read_before(window) if asks else ()
        else:
            self._agreed = None
        if self._dp_size > 1 and (shares or (rows is not None and not rows.even)):
            return self._of_uneven(loss, window, shares, closes=closes, by_items=by_items)
        if kept is not None and (kept.outputs or kept.held):
            return self._of_kept(loss, window, kept, by_items=by_items)
        return None

    def _read_before(self, window: Window) -> tuple[Rows, ...]:
        """Return the rows of the uneven batches that were read before, if all ranks have read the same.

        A script may train on a batch after the loop that read it: it reads one batch ahead, or keeps all of them in a
        list. Collective over the data-parallel ranks in the first backward after a loop.
        """
        if self._agreed is None:
            shares = sorted(window.shares, key=lambda share: (share.real, share.loaded))
            digest = hash(tuple((share.real, share.loaded) for share in shares)) % 2**20
            told = torch.tensor([digest, -digest], dtype=torch.float32, device=self._backend.topology.device)
            least, negated_largest = self._backend.reduce(told, "min").tolist()
            self._agreed = tuple(shares) if least == -negated_largest else ()
        return self._agreed

    def _of_uneven(
        self, loss: Tensor, window: Window, shares: Sequence[Rows], *, closes: bool, by_items: bool
    ) -> float | None:
        """The weight of a loss where batches are distributed unevenly, in a unit of the batch; ``None``: the window's.

        Which batch a loss is over is read from its graph, and agreed upon: ranks hold different numbers of rows of such
        a batch, so that a tensor of another batch cannot have as many rows as this one on every rank. A loss over rows
        of no batch weighs the same on every rank, and so does one that the script has multiplied by the number of its
        rows. Collective over the data-parallel ranks.

        Raises:
            UsageError: one loss joins means over batches of several weights, or nothing tells which batch it is over.
        """
        shares = shares or (() if window.rows is None else (window.rows,))
        # Ranks may make different numbers of backwards in no_sync; what an engine defers has no graph yet.
        if not (closes or window.open) or self._pipelined or loss.grad_fn is None:
            return None
        if (window.conflict and window.open and window.length > 1) or not shares:
            return None
        if any(not share.counted or share.missing for share in shares):
            return None
        terms = rows_of_terms(loss)[:_TERMS]
        said = torch.ones(_TERMS + 1, len(shares) * _VIEWS + 5)
        said[_TERMS, :2] = torch.tensor([len(terms), -len(terms)])
        numbers = [share.loaded[self._dp_rank] * times for share in shares for times in range(1, _VIEWS + 1)]
        for number, term in enumerate(terms):
            matches = [each in term.first for each in numbers]
            factor = 1.0 if term.factor is None else term.factor
            of_row = factor / next((each for each, match in zip(numbers, matches, strict=True) if match), 1)
            both = [factor, -factor, of_row, -of_row]
            said[number] = torch.tensor([*matches, not term.computes, *both], dtype=said.dtype)
        agreed = self._backend.reduce(said.to(self._backend.topology.device), "min").tolist()
        fewest, negated_most, *_ = agreed[_TERMS]
        found: set[Rows | None] = set()
        # Means over two batches are one kind of term where both have as many rows, which they may have on some ranks.
        unclear, repeated = fewest != -negated_most, False
        for *matches, is_penalty, factor, negated_factor, of_row, negated_of_row in agreed[: len(terms)]:
            over = {share for number, share in enumerate(shares) if any(matches[number * _VIEWS :][:_VIEWS])}
            # Where all ranks hold one row, some of them a repeated one, a few rows of another batch look like views.
            unclear |= len(shares) == 1 and shares[0].padded and bool(over) and not matches[0]
            # Of equal parts the mean of the means is the mean of all, as of rows of no batch.
            kinds = {None if share.even else share for share in over} or {None}
            if not _are_close(factor, -negated_factor) and _are_close(of_row, -negated_of_row):
                # The script has weighed it by its rows: a sum over all rows, times a constant.
                kinds, repeated = {None}, repeated or any(not share.real[self._dp_rank] for share in over)
            # A penalty on weights is right with each.
            if over or not is_penalty:
                found |= kinds
        if unclear or len({None if one is None else one.real for one in found}) > 1:
            if window.conflict or by_items:
                return None
            why = "adds a mean over the samples of the batch to a mean over other samples"
            cure = "Call accelerator.backward once for each of the two, or give the DataLoader drop_last=True."
            if unclear:
                why = "may be a mean over samples of the batch or over other samples"
                cure = "Give the DataLoader drop_last=True."
            raise UsageError(
                f"the ranks hold {_list(shares[0].real)} samples of this batch, and the loss {why}, so that no weight "
                "of the ranks' losses gives the loss of one process",
                cure=cure,
            )
        share = next(iter(found), None)
        if share is None:
            return 0.0 if repeated else window.share_of_batch
        return share.weight(self._dp_rank) * window.share_of_batch

    def _of_kept(self, loss: Tensor, window: Window, kept: KeptBatches, *, by_items: bool) -> float | None:
        """The weight of a loss over an uneven batch that the script kept from an earlier loop; ``None``: the window's.

        Not collective: which batch it is over is known by memory, of what the models were given or of the labels.

        Raises:
            UsageError: one loss joins means over such a batch and over others.
        """
        if loss.grad_fn is None:
            return None
        found: set[Rows] = set()
        others = False
        if kept.outputs:
            nodes, others = outputs_below(loss, kept.outputs)
            found = {kept.outputs.pop(node) for node in nodes}
        if not found:
            unknown = []
            for node, target in targets_of_terms(loss):
                share = None if target is None else kept.rows_of(target)
                if share is None:
                    unknown.append(node)
                else:
                    found.add(share)
            others = bool(found) and any(map(computes_with_data, unknown))
        if not found:
            return None
        share = next(iter(found))
        if others or len({one.real for one in found}) > 1:
            if by_items:
                return None
            raise UsageError(
                f"no weight makes this loss that of one process: the ranks hold {_list(share.real)} samples of a "
                "batch that was kept from an earlier loop, and it joins means over them and others",
                cure="Call backward once for the loss of the batch and once for that of others. Or: Give the "
                "DataLoader drop_last=True.",
            )
        return share.weight(self._dp_rank) * window.share_of_batch


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
