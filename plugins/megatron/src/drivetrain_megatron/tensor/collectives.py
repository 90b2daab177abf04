"""Converts between plain, sharded and partial tensors over the axis ``tp``, forward and backward.

There are three kinds of tensors on the ranks of the axis. *Plain*: the same values and, in backward,
the same whole gradient. *Sharded*: this rank's part of the values, and the gradient of that part. *Partial*: values
whose sum over the ranks counts, and the whole gradient. Every function here keeps that, so any order of them is right
(the conjugate pairs f and g of Shoeybi et al., Megatron-LM, arXiv 1909.08053, and of Korthikanti et al., arXiv
2205.05198).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from drivetrain_megatron.tensor.layout import Layout

# torch 2.13 renamed both and deprecates the old names; 2.9 to 2.12 have only the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class Ring:
    """The ranks of the axis ``tp``, as seen from one of them. Every method but :meth:`divides` is collective over them.

    Args:
        group: their process group; ``None`` for a single rank, for which every method is local.
        sequence_parallel: what becomes whole after a row-wise layer stays cut along the sequence.
        simulated: without a group, the number of ranks as whose first one this process computes on tensors without
            values: shapes are right, and what would be sent is noted.

    Attributes:
        sent: of a simulated ring each message: the collective, and bytes of what is reduced or gathered.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, sequence_parallel: bool = False, simulated: int = 1) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = simulated if group is None else dist.get_world_size(group)
        self.sent: list[tuple[str, int]] = []

    def divides(self, length: int, tensor: Any) -> bool:
        """Whether a dim of this length can be cut evenly."""
        return length % self.size == 0

    def wants_parts(self, tensor: Any, sizes: Sequence[int]) -> None:
        """Code cut the cut dim into pieces of these sizes, and there are no such parts; what follows gathers it."""

    def enter(self, plain: Tensor) -> Tensor:
        """A plain tensor that will be combined with shards: the parts of its gradient are added up."""
        if not plain.requires_grad or not torch.is_grad_enabled():
            return plain
        if plain.is_leaf:
            return _Enter.apply(plain, self)  # type: ignore[no-any-return, no-untyped-call]
        # Layers that read the same tensor share one reduction of its gradient. What they read is a view of the tensor
        # and holds it; a reference back would keep both for ever, since Python's collector does not see a view's base.
        known = plain.__dict__.get("_entered")
        if known is not None and known[0] is self and known[1] == plain._version:  # noqa: SLF001 (documented)
            again: Tensor | None = known[2]()
            if again is not None:
                return again
        entered: Tensor = _Enter.apply(plain, self)  # type: ignore[no-untyped-call]
        plain.__dict__["_entered"] = (self, plain._version, weakref.ref(entered))  # noqa: SLF001
        return entered

    def cut(self, plain: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a plain tensor."""
        return _Cut.apply(plain, layout, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, local: Tensor, layout: Layout) -> Tensor:
        """The plain tensor of all parts."""
        return _Gather.apply(local, layout, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather_and_enter(self, local: Tensor, layout: Layout) -> Tensor:
        """:meth:`gather` followed by :meth:`enter`, with one collective in backward."""
        return _GatherAndEnter.apply(local, layout, self)  # type: ignore[no-any-return, no-untyped-call]

    def sum(self, partial: Tensor) -> Tensor:
        """The plain sum over ranks."""
        return _Sum.apply(partial, self)  # type: ignore[no-any-return, no-untyped-call]

    def sum_and_cut(self, partial: Tensor, layout: Layout) -> Tensor:
        """:meth:`sum` followed by :meth:`cut`, with one collective."""
        return _SumAndCut.apply(partial, layout, self)  # type: ignore[no-any-return, no-untyped-call]

    def largest(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks; no gradient."""
        found = values.detach().clone()
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        else:
            self._note("all_reduce", found)
        return found

    # What the functions below call; no autograd in these.

    def add_up(self, values: Tensor) -> Tensor:
        """Sum over ranks, in memory of its own."""
        found = values.clone() if values.is_contiguous() else values.contiguous()
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        else:
            self._note("all_reduce", found)
        return found

    def part(self, whole: Tensor, layout: Layout, rank: int | None = None) -> Tensor:
        """A rank's part; this rank's without a ``rank``."""
        own = layout.spans(self.rank if rank is None else rank, self.size)
        pieces = [whole.narrow(layout.dim, start, length) for start, length in own]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, layout.dim)

    def collect(self, local: Tensor, layout: Layout) -> Tensor:
        """All parts, in their order."""
        if self.size == 1:
            return local
        longest = layout.longest(self.size)
        mine = _padded(local, layout.dim, longest)
        rows = mine.movedim(layout.dim, 0).contiguous()
        gathered = rows.new_empty((self.size * longest, *rows.shape[1:]))
        if self.group is not None:
            _all_gather(gathered, rows, group=self.group)
        else:
            self._note("all_gather", gathered)
        if layout.parts is not None or not layout.even(self.size):
            gathered = torch.cat(self._in_order(gathered, layout, longest))
        return gathered.movedim(0, layout.dim).contiguous()

    def add_up_and_part(self, values: Tensor, layout: Layout) -> Tensor:
        """This rank's part of the sum over ranks."""
        if self.size == 1:
            return values
        longest = layout.longest(self.size)
        parts = [_padded(self.part(values, layout, rank), layout.dim, longest) for rank in range(self.size)]
        rows = torch.cat([part.movedim(layout.dim, 0) for part in parts]).contiguous()
        own = rows.new_empty((longest, *rows.shape[1:]))
        if self.group is not None:
            _reduce_scatter(own, rows, group=self.group)
        else:
            self._note("reduce_scatter", rows)
        length = layout.local_length(self.rank, self.size)
        return own[:length].movedim(0, layout.dim).contiguous()

    def _note(self, operation: str, message: Tensor) -> None:
        if self.size > 1:
            self.sent.append((operation, message.numel() * message.element_size()))

    def _in_order(self, gathered: Tensor, layout: Layout, longest: int) -> list[Tensor]:
        """Split what each rank sent into pieces, sorted by their place in the full dim."""
        pieces: list[tuple[int, Tensor]] = []
        for rank in range(self.size):
            at = rank * longest
            for start, length in layout.spans(rank, self.size):
                if length:
                    pieces.append((start, gathered[at : at + length]))
                at += length
        return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros([*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]])], dim)


def _differentiably() -> bool:
    """Whether a backward is to be differentiated itself, ``create_graph=True``: then it runs the functions above."""
    return torch.is_grad_enabled()


class _Enter(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, plain: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring  # type: ignore[attr-defined]
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (ctx.ring.sum(grad) if _differentiably() else ctx.ring.add_up(grad)), None


class _Cut(Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, layout: Layout, ring: Ring) -> Tensor:
        ctx.layout, ctx.ring = layout, ring
        return ring.part(plain, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ring, layout = ctx.ring, ctx.layout
        return (ring.gather(grad, layout) if _differentiably() else ring.collect(grad, layout)), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, ring: Ring) -> Tensor:
        ctx.layout, ctx.ring = layout, ring
        return ring.collect(local, layout).view(layout.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ring, layout = ctx.ring, ctx.layout
        return (ring.cut(grad, layout) if _differentiably() else ring.part(grad, layout)), None, None


class _GatherAndEnter(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ring, layout = ctx.ring, ctx.layout
        return (ring.sum_and_cut(grad, layout) if _differentiably() else ring.add_up_and_part(grad, layout)), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.add_up(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_Enter.apply(grad, ctx.ring) if _differentiably() else grad), None  # type: ignore[no-untyped-call]


class _SumAndCut(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, layout: Layout, ring: Ring) -> Tensor:
        ctx.layout, ctx.ring = layout, ring
        return ring.add_up_and_part(partial, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ring, layout = ctx.ring, ctx.layout
        return (ring.gather_and_enter(grad, layout) if _differentiably() else ring.collect(grad, layout)), None, None
