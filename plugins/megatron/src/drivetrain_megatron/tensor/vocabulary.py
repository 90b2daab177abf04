"""Rules of vocabulary-parallel embeddings and losses: the full logits are never gathered.

The loss follows Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3: ``log sum exp`` from each rank's maximum
and sum, the label's logit from the rank that holds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from drivetrain.api import UnsupportedError
from drivetrain_megatron.tensor.collectives import Ring
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.sharded import Sharded, by_gathering, complete, local, rule, settled, sharded, whole


@rule("embedding")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table ``(V, C)``; each rank looks up the rows that it holds."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False)) | kwargs
    ids, table = given.pop("input"), given.pop("weight")
    ids = whole(ids) if isinstance(ids, Sharded) else ids
    if not isinstance(table, Sharded):
        return func(ids, table, **given)
    ring, spec = table.ring, table.spec
    if given.get("max_norm") is not None or given.get("sparse"):
        raise UnsupportedError(
            f"an embedding with max_norm or sparse gradients cannot be cut ({table.owner})",
            cure=f"Write {table.owner.rpartition('.')[0] or table.owner}: replicated into megatron.tp_plan, beside the "
            "layers to share, or leave tp_plan out.",
        )
    if spec.dim == 1:
        shape = (*ids.shape, spec.length)
        return sharded(func(ids, local(table), **given), Layout(shape, ids.dim(), spec.parts), ring)
    start, length = spec.spans(ring.rank, ring.size)[0]
    own = ids - start
    foreign = (own < 0) | (own >= length)
    padding = given.pop("padding_idx", None)
    if padding is not None:
        padding %= spec.length
        given["padding_idx"] = padding - start if start <= padding < start + length else None
    rows = local(table)
    if not length:
        # Nothing can be looked up in a table without rows; the empty sum keeps it in the graph.
        rows = rows.sum(0, keepdim=True)
    found = func(own.masked_fill(foreign, 0), rows, **given)
    return complete(found.masked_fill(foreign.unsqueeze(-1), 0.0), ring)


@rule("cross_entropy")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``logits (N, V, ...)`` or ``(V,)`` against class indices."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    part, target, weight = settled(given.pop("input")), given.pop("target"), given.pop("weight", None)
    target = whole(target) if isinstance(target, Sharded) else target
    if not isinstance(part, Sharded):
        return func(part, target, weight, **given)
    dims = len(part.spec.shape)
    classes = 1 if dims > 1 else 0
    smoothing, reduction = given.get("label_smoothing", 0.0), given.get("reduction", "mean")
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if target.is_floating_point() or legacy or (weight is not None and smoothing):
        return by_gathering(func, (part, target, weight), given)
    ignored = given.get("ignore_index", -100)
    if part.spec.dim == classes:
        if part.spec.parts is not None:
            return by_gathering(func, (part, target, weight), given)
        losses = _by_classes(part, target, classes, ignored, smoothing)
        losses = losses if weight is None else losses * _weights(weight, target, ignored)
    else:
        losses = _by_samples(func, part, target, weight, given)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    count = (target != ignored).sum() if weight is None else _weights(weight, target, ignored).sum()
    return total / count


def _weights(weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    counts = target != ignored
    return weight[target.masked_fill(~counts, 0)] * counts


def _by_classes(part: Sharded, target: Tensor, classes: int, ignored: int, smoothing: float) -> Tensor:
    """The loss of each position, plain."""
    values = local(part)
    low = values.dtype in {torch.float16, torch.bfloat16}
    spec = part.spec
    logits = values.movedim(classes, -1).reshape(target.numel(), values.shape[classes])
    start, length = spec.spans(part.ring.rank, part.ring.size)[0]
    losses = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        logits, target.reshape(-1), (start, length, spec.length), ignored, smoothing, part.ring
    )
    if low and not torch.is_autocast_enabled(values.device.type):
        losses = losses.to(values.dtype)
    return losses.view(target.shape)  # type: ignore[no-any-return]


def _by_samples(func: Any, part: Sharded, target: Tensor, weight: Tensor | None, given: dict[str, Any]) -> Tensor:
    """Logits of which each rank holds some positions: it computes their losses, and the losses are gathered."""
    ring, spec = part.ring, part.spec
    dim = spec.dim - (spec.dim > 1)
    cut = Layout(tuple(target.shape), dim, spec.parts)
    own = func(local(part), ring.part(target, cut), weight, **{**given, "reduction": "none"})
    return ring.gather(own, cut)


class _VocabularyLoss(Function):
    """Cross entropy of rows ``(N, v)`` of which each rank holds ``v`` of ``V`` columns; ``(N,)``, float32 or wider.

    Only the local logits are kept for backward. Collective: a maximum and a sum of three numbers for each row.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, span: tuple[int, int, int], ignored: int, smoothing: float, ring: Ring
    ) -> Tensor:
        start, length, classes = span
        values = logits if logits.dtype == torch.float64 else logits.float()
        lowest = torch.finfo(values.dtype).min
        highest = ring.largest(values.amax(-1) if length else values.new_full(values.shape[:1], lowest))
        counts = target != ignored
        own = target - start
        here = counts & (own >= 0) & (own < length)
        index = own.masked_fill(~here, 0).unsqueeze(-1)
        picked = values.gather(-1, index).squeeze(-1) if length else torch.zeros_like(highest)
        sums = [(values - highest.unsqueeze(-1)).exp().sum(-1), picked.masked_fill(~here, 0.0)]
        if smoothing:
            sums.append(values.sum(-1))
        total = ring.add_up(torch.stack(sums))
        log_total = total[0].log() + highest
        losses = log_total - (1.0 - smoothing) * total[1]
        if smoothing:
            losses = losses - smoothing / classes * total[2]
        ctx.save_for_backward(logits, log_total, index, here, counts)
        ctx.smoothing, ctx.classes, ctx.ring = smoothing, classes, ring
        return losses.masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, log_total, index, here, counts = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(ctx, grad, logits, log_total, index, here, counts)
            return found.to(logits.dtype), None, None, None, None, None
        factor = (grad * counts).to(log_total.dtype).unsqueeze(-1)
        found = (logits.to(log_total.dtype) - log_total.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.classes
        found *= factor
        if found.shape[-1]:
            found.scatter_add_(-1, index, -(1.0 - ctx.smoothing) * factor * here.unsqueeze(-1))
        return found.to(logits.dtype), None, None, None, None, None


def _differentiable(
    ctx: Any, grad: Tensor, logits: Tensor, log_total: Tensor, index: Tensor, here: Tensor, counts: Tensor
) -> Tensor:
    """The gradient as a function of the logits and of what comes back, for ``create_graph=True``. Collective."""
    ring: Ring = ctx.ring
    values, known = logits.to(log_total.dtype), log_total.detach()
    total = known + ring.sum((values - known.unsqueeze(-1)).exp().sum(-1)).log()
    factor = ring.enter((grad * counts).to(log_total.dtype)).unsqueeze(-1)
    found = (values - ring.enter(total).unsqueeze(-1)).exp() - ctx.smoothing / ctx.classes
    picked = torch.zeros_like(values)
    if picked.shape[-1]:
        picked.scatter_(-1, index, here.unsqueeze(-1).to(values.dtype))
    slopes: Tensor = (found - (1.0 - ctx.smoothing) * picked) * factor
    return slopes


@rule("nll_loss")
def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Log-probabilities ``(N, V)`` against class indices."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs
    part, target = settled(given["input"]), given["target"]
    simple = isinstance(part, Sharded) and part.spec.parts is None and len(part.spec.shape) == 2 and part.spec.dim == 1
    if not simple or isinstance(target, Sharded) or given.get("weight") is not None:
        return by_gathering(func, args, kwargs)
    ring, ignored = part.ring, given.get("ignore_index", -100)
    start, length = part.spec.spans(ring.rank, ring.size)[0]
    own = target - start
    here = (target != ignored) & (own >= 0) & (own < length)
    picked = local(part).gather(1, own.masked_fill(~here, 0).unsqueeze(1)).squeeze(1) if length else own * 0.0
    losses = -ring.sum(picked.masked_fill(~here, 0.0))
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignored).sum()
