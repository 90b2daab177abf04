"""Converts one rank's shards between the user's parameter layout and Megatron-Core's. Tensors in, tensors out.

Shapes: H hidden size, D head size, G query groups on this rank, Q queries of a group, F feed-forward width on this
rank, E experts. Weights of linear layers are ``[out, in]`` in Megatron-Core, biases ``[out]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Rearrangement:
    """Two functions, each the other's inverse, and a short way for the first.

    Args:
        join: the user's tensors to Megatron-Core's.
        split: Megatron-Core's tensors to the user's: views where they lie alike.
        places: Megatron-Core's tensors cut where the user's lie, each with as many numbers in the same order; ``None``
            where no view can show that.
    """

    join: Callable[[Tensors], list[Tensor]]
    split: Callable[[Tensors], list[Tensor]]
    places: Callable[[Tensors], Sequence[Tensor]] | None = None

    def fill(self, theirs: Tensors, ours: Tensors) -> None:
        """Copy the user's values into Megatron-Core's tensors, at once where that can be."""
        if self.places is None:
            for one, value in zip(theirs, self.join(ours), strict=True):
                one.copy_(value)
            return
        for place, value in zip(self.places(theirs), ours, strict=True):
            place.copy_(value.reshape(place.shape))


SAME = Rearrangement(list, list)
TRANSPOSED = Rearrangement(lambda ours: [one.t() for one in ours], lambda theirs: [one.t() for one in theirs])
"""Transformers' ``Conv1D`` keeps ``[in, out]``."""

GATED = Rearrangement(lambda ours: [torch.cat(list(ours))], lambda theirs: list(theirs[0].chunk(2)))
"""Gate ``[F, H]`` and up ``[F, H]``, one ``[2F, H]``."""


def heads(queries: int, head_size: int) -> Rearrangement:
    """Queries ``[G*Q*D, H]``, keys ``[G*D, H]`` and values ``[G*D, H]``; one ``[G*(Q+2)*D, H]``, group by group.

    Args:
        queries: Q.
        head_size: D.
    """
    sizes = [queries * head_size, head_size, head_size]

    def join(ours: Tensors) -> list[Tensor]:
        rest = ours[0].shape[1:]
        groups = [one.reshape(-1, size, *rest) for one, size in zip(ours, sizes, strict=True)]
        return [torch.cat(groups, 1).reshape(-1, *rest)]

    def places(theirs: Tensors) -> Sequence[Tensor]:
        return torch.split(theirs[0].view(-1, sum(sizes), *theirs[0].shape[1:]), sizes, 1)

    def split(theirs: Tensors) -> list[Tensor]:
        return [one.reshape(-1, *theirs[0].shape[1:]) for one in places(theirs)]

    return Rearrangement(join, split, places)


def packed_heads(head_size: int) -> Rearrangement:
    """GPT-2's ``c_attn``, ``[H, 3*G*D]`` or ``[3*G*D]``: queries, keys and values side by side, as many heads of each.

    Args:
        head_size: D.
    """
    inner = heads(1, head_size)
    return Rearrangement(
        lambda ours: inner.join(ours[0].t().chunk(3)),
        lambda theirs: [torch.cat(inner.split(theirs)).t()],
    )


def padded_rows(rows: int, padded: int) -> Rearrangement:
    """This rank's rows of a vocabulary; in Megatron-Core every rank has as many, the last ones zero.

    Args:
        rows: that the user's part has.
        padded: that Megatron-Core's has.
    """

    def join(ours: Tensors) -> list[Tensor]:
        (part,) = ours
        return [part if rows == padded else torch.cat([part, part.new_zeros(padded - rows, *part.shape[1:])])]

    return Rearrangement(join, lambda theirs: [theirs[0][:rows]])


EXPERTS_OUT = Rearrangement(lambda ours: list(ours[0].unbind()), lambda theirs: [torch.stack(list(theirs))])
"""``[E, ...]`` of all experts; one tensor an expert."""
