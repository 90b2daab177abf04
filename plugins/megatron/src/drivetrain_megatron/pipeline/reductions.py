"""Scales sums and means over a batch so that they can be computed on micro-batches.

A loss is a sum or a mean over samples. On one micro-batch of ``M`` each such reduction is multiplied so that the mean
of the ``M`` results is the reduction over the whole batch:

* a sum by ``M``;
* a mean over ``n_i`` of ``n`` elements by ``M * n_i / n``, which is 1 for parts of one size;
* a mean over the labels that count (``ignore_index``, class weights) becomes the sum, times ``M / n``, since a part may
  have none that count.

What is linear in its reductions then has the whole batch's value and gradient as the mean over the micro-batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain_megatron.pipeline.skeleton import is_absent

Count = float | Tensor

LOSSES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function)
    for function in (
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.soft_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.multi_margin_loss,
        F.hinge_embedding_loss,
        F.margin_ranking_loss,
        F.cosine_embedding_loss,
        F.triplet_margin_loss,
        F.poisson_nll_loss,
        F.gaussian_nll_loss,
    )
}
"""Torch's losses that take ``reduction``."""

SUMS = frozenset({torch.sum, Tensor.sum, torch.nansum, Tensor.nansum, torch.count_nonzero, Tensor.count_nonzero})
MEANS = frozenset({torch.mean, Tensor.mean})
_MEANS_OVER_ROWS = frozenset({F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss})


@dataclass(frozen=True)
class Reduction:
    """One call of a reduction, and what it counts.

    Args:
        kind: ``"sum"``, ``"mean"`` or ``"counted"`` (a mean over the labels that count).
        count: elements that the mean is over; of a sum 1.
        size: elements that are reduced, counted or not; the same in every part when the batch is not among them.
    """

    kind: str
    count: Count
    size: int


def reduction_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
    """Return the reduction of a call; ``None`` if it is no sum or mean."""
    if func in LOSSES:
        bound = LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        return _of_loss(func, bound.arguments)
    if func in SUMS or func in MEANS:
        value = args[0] if args else kwargs["input"]
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        chosen = range(value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        size = math.prod(value.shape[dim] for dim in chosen)
        return Reduction("sum", 1.0, size) if func in SUMS else Reduction("mean", float(size), size)
    return None


def _of_loss(func: Any, given: dict[str, Any]) -> Reduction | None:
    kind, value = given["reduction"], next(iter(given.values()))
    size = value.numel()
    if kind == "sum":
        return Reduction("sum", 1.0, size)
    if kind == "batchmean":
        return Reduction("mean", float(value.shape[0]), size)
    if kind != "mean":
        return None
    if func in {F.cross_entropy, F.nll_loss}:
        labels = given["target"]
        if is_absent(labels) or labels.is_floating_point():
            return Reduction("mean", size / value.shape[1 if value.dim() > 1 else 0], size)
        return Reduction("counted", _counted(labels, given["weight"], given["ignore_index"]), size)
    if func in _MEANS_OVER_ROWS:
        return Reduction("mean", float(value.shape[0]), size)
    shapes = [one.shape for one in given.values() if isinstance(one, Tensor) and one.dim()]
    return Reduction("mean", float(torch.broadcast_shapes(*shapes).numel()), size)  # type: ignore[no-untyped-call]


def _counted(labels: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    counts = labels != ignored
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, labels, 0)] * counts).sum()


def in_part(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    here: Reduction,
    whole: Reduction,
    parts: int,
) -> Any:
    """Call a reduction on one micro-batch so that the mean over the micro-batches is the whole batch's value.

    Args:
        func: the reduction.
        args: on this micro-batch.
        kwargs: likewise.
        here: what it counts here.
        whole: what it counts on the whole batch.
        parts: number of micro-batches.
    """
    if parts == 1 or here.size == whole.size:
        return func(*args, **kwargs)
    if here.kind == "sum":
        return func(*args, **kwargs) * parts
    if here.kind == "counted":
        bound = LOSSES[func].bind(*args, **kwargs)
        bound.arguments["reduction"] = "sum"
        return func(**bound.arguments) * (parts / whole.count)
    factor = parts * here.count / whole.count
    result = func(*args, **kwargs)
    return result if factor == 1.0 else result * factor


@final
class Counting(TorchFunctionMode):
    """Notes every reduction of a whole batch's forward, in order; what has its true value already is noted as that.

    Args:
        on_loss: called at each of torch's losses.
    """

    def __init__(self, on_loss: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.found: list[Reduction | Tensor] = []
        self._on_loss = on_loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reduction = _whole_reduction(func, args, kwargs, result)
        if reduction is not None:
            has_value = func not in LOSSES and not is_absent(result)
            self.found.append(result if has_value else reduction)
            if func in LOSSES:
                self._on_loss()
        return result


@final
class Adjusting(TorchFunctionMode):
    """Replaces every reduction of a micro-batch's forward as :func:`in_part` says.

    Args:
        whole: what :class:`Counting` found.
        parts: number of micro-batches.
    """

    def __init__(self, whole: Sequence[Reduction | Tensor], parts: int) -> None:
        super().__init__()
        self._whole, self._parts, self._next, self._paused = whole, parts, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or (func not in LOSSES and func not in SUMS and func not in MEANS):
            return func(*args, **kwargs)
        here = reduction_of(func, args, kwargs)
        if here is None or (func not in LOSSES and func(*args, **kwargs).dim()):
            return func(*args, **kwargs)
        assert self._next < len(self._whole), "a micro-batch computes more losses than the whole batch"
        whole = self._whole[self._next]
        self._next += 1
        if isinstance(whole, Tensor):
            return whole
        return in_part(func, args, kwargs, here, whole, self._parts)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of a module that computes no loss, where reductions are the model's own business."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


def _whole_reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Reduction | None:
    """The reduction, if it is a loss or gives one number."""
    if func not in LOSSES and func not in SUMS and func not in MEANS:
        return None
    if func not in LOSSES and result.dim():
        return None
    return reduction_of(func, args, kwargs)
