"""Whether a loss is a sum over the rows of a batch, read from the graph that autograd has recorded for it.

Engines average over data-parallel ranks. Of a mean over each rank's rows that is the mean over all rows; of a sum over
each rank's rows it is 1/ranks of the sum over all rows. The graph says which of them a script has computed. It does not
say everything: where it leaves a doubt, the answer is no.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SUM = 2
"""torch's number for ``reduction="sum"``."""

_LOSSES = frozenset(
    {
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "HuberLossBackward0",
        "MseLossBackward0",
        "MultiMarginLossBackward0",
        "MultilabelMarginLossBackward0",
        "NllLoss2DBackward0",
        "NllLossBackward0",
        "SmoothL1LossBackward0",
        "SoftMarginLossBackward0",
    }
)
_SUMS = frozenset({"SumBackward0", "SumBackward1"})
_VIEWS = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SliceBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "SqueezeBackward4",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
_ADDS = frozenset({"AddBackward0", "AddBackward1", "RsubBackward1", "SubBackward0", "SubBackward1"})
_PRODUCTS = frozenset({"DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1"})
_LINEAR = (
    _VIEWS
    | _ADDS
    | {
        "CatBackward0",
        "GatherBackward0",
        "IndexBackward0",
        "MaskedFillBackward0",
        "MaskedSelectBackward0",
        "NegBackward0",
        "SelectBackward0",
        "StackBackward0",
        "WhereBackward0",
    }
)
_ELEMENTWISE = frozenset(
    {
        "AbsBackward0",
        "ClampBackward0",
        "ClampBackward1",
        "ClampMaxBackward0",
        "ClampMinBackward0",
        "ExpBackward0",
        "LerpBackward0",
        "LerpBackward1",
        "Log1PBackward0",
        "LogBackward0",
        "LogSigmoidBackward0",
        "LogSoftmaxBackward0",
        "MaximumBackward0",
        "MinimumBackward0",
        "PowBackward0",
        "ReciprocalBackward0",
        "ReluBackward0",
        "SigmoidBackward0",
        "SoftmaxBackward0",
        "SoftplusBackward0",
        "SqrtBackward0",
        "TanhBackward0",
        "XlogyBackward0",
    }
)
_OVER_DIMS = frozenset(
    {"LinalgVectorNormBackward0", "LogsumexpBackward0", "MeanBackward1", "NormBackward1", "SumBackward1"}
)
_MIXES_ROWS = frozenset(
    {
        "AmaxBackward0",
        "AminBackward0",
        "CdistBackward0",
        "CumprodBackward0",
        "CumsumBackward0",
        "DotBackward0",
        "IndexAddBackward0",
        "IndexReduceBackward0",
        "KthvalueBackward0",
        "LogcumsumexpBackward0",
        "MaxBackward0",
        "MaxBackward1",
        "MeanBackward0",
        "MedianBackward0",
        "MedianBackward1",
        "MinBackward0",
        "MinBackward1",
        "MvBackward0",
        "NormBackward0",
        "ProdBackward0",
        "ProdBackward1",
        "ScatterAddBackward0",
        "ScatterReduceBackward0",
        "SortBackward0",
        "StdBackward0",
        "StdMeanBackward0",
        "SumBackward0",
        "TopkBackward0",
        "VarBackward0",
        "VarMeanBackward0",
    }
)
"""Of all rows, or along a dimension that may be theirs."""
_PRODUCTS_OF_MATRICES = frozenset({"AddmmBackward0", "MmBackward0"})
_TRANSPOSES = frozenset({"PermuteBackward0", "TBackward0", "TransposeBackward0"})
_MANY = 256
"""Nodes after which a graph below a sum is not read on."""


class _Term(NamedTuple):
    """A sum in the graph of a loss.

    Args:
        node: its node.
        sizes: of what it adds up.
        factors: numbers that it is multiplied by on its way to the loss.
    """

    node: Any
    sizes: tuple[int, ...]
    factors: tuple[float, ...]


def sums_over_batch(loss: Tensor, rows: int, ranks: int) -> bool:
    """Whether a loss has a term that is a sum over the rows of this rank's batch and is not divided by their number.

    Reads the values of constants only where it finds such a sum. Local.

    Args:
        loss: one number, with its graph.
        rows: of this rank's batch. A sum over one row is its mean, and never found.
        ranks: data-parallel ranks. A sum that is multiplied by them (or a multiple) is meant as it is.
    """
    if rows < 2 or loss.grad_fn is None:
        return False
    return any(
        _has_rows(term, rows) and not _is_scaled(term, rows, ranks) and _comes_from_batch(term, rows)
        for term in _terms(loss.grad_fn)
    )


def _terms(start: Any) -> Iterator[_Term]:
    """The sums that a loss is a linear function of, without those that a number of rows or a tensor divides."""
    pending: list[tuple[Any, tuple[float, ...]]] = [(start, ())]
    while pending:
        node, factors = pending.pop()
        name = node.name()
        if name in _LOSSES:
            if node._saved_reduction == _SUM:  # noqa: SLF001 (torch documents these names for looking at)
                yield _Term(node, tuple(node._saved_self.shape), factors)  # noqa: SLF001
        elif name in _SUMS and not _adds_scalars(node):
            yield _Term(node, tuple(node._saved_self_sym_sizes), factors)  # noqa: SLF001
        elif name in _SUMS or name in _ADDS or name in _VIEWS or name in ("NegBackward0", "StackBackward0"):
            pending.extend((each, factors) for each in _inner(node))
        elif name in _PRODUCTS and len(_inner(node)) == 1:
            factor = _factor(node)
            if factor is not None:
                pending.append((_inner(node)[0], (*factors, factor)))


def _adds_scalars(node: Any) -> bool:
    """Whether it adds up one number, or several that were stacked, as those of several heads."""
    sizes, inner = node._saved_self_sym_sizes, _inner(node)  # noqa: SLF001
    return math.prod(sizes) == 1 or (len(sizes) == 1 and bool(inner) and inner[0].name() == "StackBackward0")


def _has_rows(term: _Term, rows: int) -> bool:
    """Whether the first dimension of what is added up is that of the batch."""
    first = term.sizes[0] if term.sizes else 0
    if first == rows:
        return True
    node = term.node
    for _ in range(16):
        inner = _inner(node)
        if len(inner) != 1:
            return False
        node = inner[0]
        name = node.name()
        if name == "SumBackward1":
            # Over the batch first, over the rest then.
            sizes = node._saved_self_sym_sizes  # noqa: SLF001
            return sizes[0] == rows and 0 in _dims(node, len(sizes))
        # Rows and words made one dimension, as of logits (batch, length, vocabulary).
        if name in ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"):
            sizes = node._saved_self_sym_sizes  # noqa: SLF001
            if len(sizes) > 1 and sizes[0] == rows and first == rows * sizes[1]:
                return True
        elif name in _LOSSES:
            if node._saved_reduction != 0:  # noqa: SLF001
                return False
        elif name not in _LINEAR and name not in _ELEMENTWISE:
            return False
    return False


def _is_scaled(term: _Term, rows: int, ranks: int) -> bool:
    """Whether a factor says how the sum is meant."""
    counts = _counts(term.sizes, rows)
    return any(
        factor == 0 or _is_reciprocal(factor, counts) or (factor >= ranks and (factor / ranks).is_integer())
        for factor in term.factors
    )


def _counts(sizes: Sequence[int], rows: int) -> set[int]:
    """What a sum is divided by to make a mean: rows, or elements over some first dimensions."""
    return {rows, *(math.prod(sizes[: end + 1]) for end in range(len(sizes)))} - {0, 1}


def _is_reciprocal(factor: float, counts: set[int]) -> bool:
    return any(math.isclose(abs(factor) * count, 1.0, rel_tol=1e-6) for count in counts)


def _comes_from_batch(term: _Term, rows: int) -> bool:
    """Whether what a sum adds up is computed row by row from a batch, and nothing before it divides by their number."""
    counts = _counts(term.sizes, rows)
    pending = [(each, term.node.name() in _SUMS) for each in _inner(term.node)]
    seen: set[Any] = set()
    found = False
    while pending and len(seen) < _MANY:
        node, linear = pending.pop()
        name = node.name()
        if node in seen or name.endswith("AccumulateGrad"):
            continue
        seen.add(node)
        if name in _MIXES_ROWS or (name in _OVER_DIMS and not _keeps_rows(node, linear=linear)):
            return False
        if name in _PRODUCTS:
            inner = _inner(node)
            linear = linear and len(inner) == 1
            if linear and _normalises(node, counts):
                return False
        elif name in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            if _signed(node._saved_dim) % max(node._saved_result.dim(), 1) == 0:  # noqa: SLF001
                return False
            linear = False
        elif name in _LINEAR or name in _ELEMENTWISE or name in _OVER_DIMS:
            linear = linear and (name in _LINEAR or name in ("MeanBackward1", "SumBackward1"))
        else:
            says = _from_model(node, name, rows)
            if says is None:
                return False
            found = found or says
            continue
        pending.extend((each, linear) for each in _inner(node))
    return found


def _keeps_rows(node: Any, *, linear: bool) -> bool:
    """Whether a reduction over some dimensions leaves that of the batch, or is itself a part of the sum over it."""
    if linear and node.name() == "SumBackward1":
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        sizes = node._saved_self.shape  # noqa: SLF001
    return 0 not in _dims(node, len(sizes))


def _from_model(node: Any, name: str, rows: int) -> bool | None:
    """Whether a node that is not elementwise reads a batch; ``None`` where it may mix rows."""
    if name in _LOSSES:
        return True if node._saved_reduction == 0 else None  # noqa: SLF001
    if name in ("BmmBackward0", "BaddbmmBackward0"):
        operand = node._saved_self if name == "BmmBackward0" else node._saved_batch1  # noqa: SLF001
        return True if operand is not None and operand.shape[0] == rows else None
    if name.startswith("Linalg"):
        return None
    if name not in _PRODUCTS_OF_MATRICES:
        return True
    one, other = (edge for edge, _ in node.next_functions[-2:])
    weights = [_is_parameter(each) for each in (one, other)]
    if all(weights):
        return False
    if any(weights):
        return True
    # A layer that is frozen; two matrices that both depend on the batch mix its rows.
    if one is not None and other is None:
        return None if one.name() in _TRANSPOSES else True
    return None


def _is_parameter(node: Any) -> bool:
    """Whether a matrix is a parameter, which may be cast and transposed."""
    for _ in range(8):
        if node is None:
            return False
        if node.name().endswith("AccumulateGrad"):
            return True
        if node.name() not in _VIEWS:
            return False
        node = node.next_functions[0][0]
    return False


def _factor(node: Any) -> float | None:
    """The number that a node multiplies by; ``None`` where that is a tensor, or a divisor that may be a count."""
    constant = _constant(node)
    number = _number(constant)
    if number is None or not node.name().startswith("Div"):
        return number
    if number in (0.0, 1.0) or (number > 0 and number.is_integer()):
        return 1.0 if number == 1.0 else None
    return 1.0 / number


def _normalises(node: Any, counts: set[int]) -> bool:
    """Whether a constant factor of the elements may make a sum over them a mean."""
    constant = _constant(node)
    if constant is None:
        return True
    if not isinstance(constant, Tensor) or constant.numel() == 1:
        factor = _factor(node)
        return factor is None or factor == 0 or _is_reciprocal(factor, counts)
    weights = constant.detach().double()
    if node.name().startswith("Div"):
        weights = weights.reciprocal()
    return math.isclose(float(weights.sum()), 1.0, rel_tol=1e-3)


def _constant(node: Any) -> Any:
    """The operand of a product that needs no gradient."""
    edges = node.next_functions
    if edges[0][0] is None:
        # A quotient's numerator makes no factor.
        return None if node.name().startswith("Div") else node._saved_self  # noqa: SLF001
    return node._saved_other  # noqa: SLF001


def _number(constant: Any) -> float | None:
    """A number of Python's, which torch keeps as a tensor that takes part in no promotion of types."""
    if isinstance(constant, int | float):
        return float(constant)
    if not isinstance(constant, Tensor) or constant.dim():
        return None
    small = torch.zeros((), dtype=torch.int8 if constant.dtype == torch.int64 else torch.float16)
    if constant.device.type != "cpu" or torch.result_type(constant, small) != small.dtype:
        return None
    return float(constant)


def _dims(node: Any, number: int) -> set[int]:
    """Dimensions that a reduction is over, all of them where it names none."""
    dims = node._saved_dim  # noqa: SLF001
    if dims is None or (isinstance(dims, tuple) and not dims):
        return set(range(number))
    return {_signed(dim) % max(number, 1) for dim in (dims if isinstance(dims, tuple) else (dims,))}


def _signed(number: int) -> int:
    # Autograd shows a signed number as an unsigned one.
    return number - 2**64 if number >= 2**63 else number


def _inner(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]
