"""Determines from its autograd graph whether a loss is a mean, and over how many items, or a sum over a batch.

``cross_entropy`` and similar functions save their labels for the backward, with ``ignore_index`` and the reduction.
Earlier operations (shifted labels, flattened logits, masks) are included, so the count is that of the loss itself.

Engines average over data-parallel ranks. For a mean over each rank's rows the result is the mean over all rows; for a
sum over each rank's rows it is 1/ranks of the sum over all rows. If the graph is ambiguous, :func:`count_items` raises,
and :func:`sums_over_batch` returns ``False``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.data.standardised import is_standardised
from drivetrain.errors import UsageError

_MEAN, _SUM = 1, 2
"""torch's numbers for ``reduction="mean"`` and ``"sum"``."""


def _base(name: str) -> str:
    """A node's name without the number of the overload: ``Sort`` of ``SortBackward1``."""
    return name.partition("Backward")[0]


def _bases(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _nodes(names: str) -> frozenset[str]:
    """Names of autograd's nodes: ``AddBackward1`` for ``Add1``, where the number distinguishes overloads."""
    return frozenset(f"{name[:-1]}Backward{name[-1]}" for name in names.split())


_NLL = _nodes("NllLoss0 NllLoss2D0")
_BY_ELEMENTS = _nodes(
    "BinaryCrossEntropy0 BinaryCrossEntropyWithLogits0 HuberLoss0 KlDiv0 MseLoss0 SmoothL1Loss0 SoftMarginLoss0"
)
_LOSSES = _NLL | _BY_ELEMENTS | _nodes("MultiMarginLoss0 MultilabelMarginLoss0")
_WEIGHTED_BY_CLASS = {
    "BinaryCrossEntropyWithLogitsBackward0": "pos_weight",
    "NllLoss2DBackward0": "weight",
    "NllLossBackward0": "weight",
}
"""Loss functions with weights of classes, and the argument that holds them."""
_WITH_TARGETS = _nodes("HuberLoss0 MseLoss0 SmoothL1Loss0")
_MEANS = _nodes("Mean0 Mean1")
_SUMS = _nodes("Sum0 Sum1")
_RESHAPES = _nodes("ReshapeAlias0 UnsafeView0 View0")
_TRANSPOSES = _nodes("Permute0 T0 Transpose0")
_VIEWS = (
    _RESHAPES
    | _TRANSPOSES
    | _nodes("Alias0 Clone0 Expand0 Slice0 Squeeze0 Squeeze1 Squeeze2 Squeeze4 ToCopy0 Unsqueeze0")
)
_ADDS = _nodes("Add0 Add1 Rsub1 Sub0 Sub1")
_PRODUCTS = _nodes("Div0 Div1 Mul0 Mul1")
_LINEAR = _VIEWS | _ADDS | _nodes("Cat0 Gather0 Index0 MaskedFill0 MaskedSelect0 Neg0 Select0 Stack0 Where0")
_ELEMENTWISE = _nodes(
    "Abs0 Acos0 Acosh0 Asin0 Asinh0 Atan0 Atanh0 Celu0 Clamp0 Clamp1 ClampMax0 ClampMin0 Cos0 Cosh0 Digamma0 Elu0 Erf0 "
    "Erfc0 Exp0 Exp20 Expm10 Gelu0 Hardsigmoid0 Hardswish0 Hardtanh0 LeakyRelu0 Lerp0 Lerp1 Lgamma0 Log0 Log100 Log1P0 "
    "Log20 LogSigmoid0 LogSoftmax0 Logaddexp0 Logit0 Maximum0 Minimum0 Mish0 NanToNum0 Pow0 Pow1 Reciprocal0 Relu0 "
    "Rsqrt0 Sigmoid0 Silu0 Sin0 Sinh0 Softmax0 Softplus0 Softshrink0 Sqrt0 Tan0 Tanh0 Xlogy0"
)
_LINEAR_IN_A_NUMBER = _LINEAR | _nodes(
    "AsStrided0 Diagonal0 Flip0 IndexSelect0 Lerp0 NanToNum0 NativeDropout0 Real0 Repeat0 RepeatInterleave0 Roll0 "
    "Split0 SplitWithSizes0 Squeeze3 Take0 TakeAlongDim0 Unbind0 UnsafeSplit0 ViewAsReal0"
)
"""Nodes that are linear in a scalar operand; what is none of these, and no product, is a function of it."""
_OVER_DIMS = _nodes("LinalgVectorNorm0 Logsumexp0 Mean1 Norm1 Sum1")
_MIXES_ROWS = _nodes("Mean0 Norm0 Sum0")
_OVER_ROWS = _nodes("LinalgVectorNorm0 LogSoftmax0 Logsumexp0 Norm0 Norm1 Softmax0")
"""Nodes that are no function of single rows where the dim that they go over is that of the batch."""
_MIXING = _bases(
    "Amax Amin Aminmax Cdist Cummax Cummin Cumprod Cumsum Dist Dot IndexAdd IndexCopy IndexReduce Kthvalue "
    "Logcumsumexp Max Median Min Mode Mv Nanmedian Nanquantile Nansum Pdist Prod Quantile ScatterAdd "
    "ScatterReduce Sort Std StdMean Topk Trace Var VarMean"
)
"""Autograd nodes of reductions over all rows, or along a possible row dim; without torch's version numbers."""
_OVER_ALL = _bases(
    "Amax Amin Aminmax Cummax Cummin Cumprod Cumsum Kthvalue LinalgVectorNorm LogSoftmax Logcumsumexp Logsumexp Max "
    "Mean Median Min Mode Nanmedian Nanquantile Nansum Norm Prod Quantile Softmax Sort Std StdMean Sum Topk Var VarMean"
)
"""Autograd nodes that a model may call on its batch: over dims that they name, or over everything."""
_SELECTS = _nodes("Index0 MaskedFill0 MaskedSelect0 Where0")
_PRODUCTS_OF_MATRICES = _nodes("Addmm0 Mm0")
_LAYERS = _bases(
    "Addmm Addmv Baddbmm Bmm Embedding EmbeddingBag Gru Lstm Mm Mv ScaledDotProductEfficientAttention "
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu"
)
"""Nodes that compute with data; convolutions, recurrent and normalising layers are known by parts of their names."""
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag"})
_MANY = 256
"""Nodes after which a graph below a sum is not read on."""
_CURE = (
    "Pass a sum: accelerator.backward(loss_sum, num_items=n); or leave count_items out, which weighs each mean by its "
    "samples."
)


class _Term(NamedTuple):
    """A node that a loss is a linear function of.

    Args:
        node: a loss function, a mean or sum over several elements, or anything that is not linear in one operand.
        factors: what it is multiplied by on its way to the loss; ``None`` for a tensor.
        divisors: whole numbers that it is divided by, which may be counts.
        tensors: the products with a tensor among the factors.
        functions: autograd functions of Python lie between, and may compute anything.
        exact: only these and views lie between, so that the loss has the value of this node.
    """

    node: Any
    factors: tuple[float | None, ...] = ()
    divisors: tuple[int, ...] = ()
    tensors: tuple[Any, ...] = ()
    functions: bool = False
    exact: bool = True


def _terms(start: Any) -> Iterator[_Term]:
    """The nodes whose linear combination a loss is, in the order in which it adds them up."""
    pending = [_Term(start)]
    while pending:
        term = pending.pop()
        node, inner = term.node, _inner(term.node)
        name = node.name()
        passes = (
            (name in _SUMS and _adds_scalars(node))
            or (name in _MEANS and math.prod(node._saved_self_sym_sizes) == 1)  # noqa: SLF001 (torch documents them)
            or name in _VIEWS
        )
        if name in _ADDS or name in ("CatBackward0", "NegBackward0", "StackBackward0"):
            passes, term = True, term._replace(exact=False)
        elif name in _PRODUCTS and len(inner) == 1 and not (name.startswith("Div") and _divides_by(node)):
            factor, divisor = _factor(node)
            divisors = term.divisors if divisor is None else (*term.divisors, divisor)
            passes, term = True, term._replace(exact=False, factors=(*term.factors, factor), divisors=divisors)
            if factor is None:
                term = term._replace(tensors=(*term.tensors, node))
        elif isinstance(node, torch.autograd.function.BackwardCFunction) and len(inner) == 1:
            # An engine's function that passes the value on, which is verified by comparing values.
            passes, term = True, term._replace(functions=True)
        if passes and inner:
            pending.extend(term._replace(node=each) for each in reversed(inner))
        else:
            yield term


# ---- means -----------------------------------------------------------------------------------------------------------


def count_items(loss: Tensor) -> Tensor | int:
    """Return the number of items that ``loss`` is a mean over. Waits for the device only for sums of means. Local.

    Args:
        loss: 0-d, with its graph: a mean as torch's loss functions compute it, or a multiple of one, or a sum of means
            over equally many items.

    Returns:
        The labels that count for a mean over labels (of a weighted one, the sum of their weights), else the elements.

    Raises:
        UsageError: the graph does not determine it.
    """
    found = _means(loss)
    if not found:
        node = loss.grad_fn
        raise UsageError(
            "count_items cannot tell what this loss is a mean over: its graph leads to "
            f"{'nothing' if node is None else node.name()}, not to a loss function of torch with reduction='mean'",
            cure=_CURE,
        )
    counts = [_count(term, loss) for term in found]
    first = counts[0]
    if len(counts) > 1 and any(bool(other != first) for other in counts[1:]):
        raise UsageError(
            f"count_items found a loss that adds means over {', '.join(str(float(each)) for each in counts)} items; no "
            "one weight makes it the loss of one big batch",
            cure=_CURE,
        )
    return first


def is_mean_of_labels(loss: Any, samples: int | None) -> bool:
    """Whether a loss is a mean over labels that do not weigh as its batch's samples do: tokens, or weighted by class.

    Does not raise. Local.
    """
    for term in _means(loss):
        name = term.node.name()
        if name not in _NLL:
            continue
        # Weighted by class it is divided by the weights of the labels that are here.
        if term.node._saved_weight is not None:  # noqa: SLF001
            return True
        if name == "NllLoss2DBackward0" or (samples and term.node._saved_target.numel() > samples):  # noqa: SLF001
            return True
        before = _next(_next(term.node))
        # Logits of shape (batch, length, vocabulary), made two-dimensional.
        if before is not None and before.name() in _RESHAPES and len(before._saved_self_sym_sizes) > 2:  # noqa: SLF001
            return True
    return False


def _means(loss: Any) -> list[_Term]:
    """The means that a loss is a linear function of; none where it has other terms."""
    node = getattr(loss, "grad_fn", None)
    terms = [] if node is None else list(_terms(node))
    return terms if all(_is_mean(term.node) for term in terms) else []


def _is_mean(node: Any) -> bool:
    name = node.name()
    if name == "MeanBackward1":
        # One number; a result with several elements may be a part of the mean.
        sizes = node._saved_self_sym_sizes  # noqa: SLF001
        dims = _dims(node, len(sizes))
        return bool(math.prod(size for dim, size in enumerate(sizes) if dim not in dims) == 1)
    return name in _MEANS or (name in _NLL | _BY_ELEMENTS and bool(node._saved_reduction == _MEAN))  # noqa: SLF001


def _count(term: _Term, loss: Tensor) -> Tensor | int:
    node = term.node
    name = node.name()
    if term.functions and not (name in _NLL and term.exact and _same(node, loss)):
        raise UsageError(
            "count_items found a Python autograd function between the loss and its mean, which may compute anything",
            cure=_CURE,
        )
    if name in _MEANS:
        number: int = math.prod(node._saved_self_sym_sizes)  # noqa: SLF001
        return number
    if name in _BY_ELEMENTS:
        elements: int = node._saved_self.numel()  # noqa: SLF001
        return elements
    if node._saved_weight is not None:  # noqa: SLF001
        weight: Tensor = node._saved_total_weight  # noqa: SLF001
        return weight
    # Not the saved total, which is of the logits' dtype: bfloat16 does not count beyond 256.
    labels: Tensor = node._saved_target  # noqa: SLF001
    return (labels != _ignored(node)).sum()


def _same(node: Any, loss: Tensor) -> bool:
    """Whether the loss has the value of this mean."""
    with torch.no_grad():
        value = F.nll_loss(
            node._saved_self,  # noqa: SLF001
            node._saved_target,  # noqa: SLF001
            node._saved_weight,  # noqa: SLF001
            ignore_index=_ignored(node),
        )
        # A step of the narrower dtype, where the loss was cast in between.
        narrow = max(torch.finfo(value.dtype).eps, torch.finfo(loss.dtype).eps)
        return bool(torch.isclose(value.float(), loss.detach().float(), rtol=4 * narrow, equal_nan=True))


def _ignored(node: Any) -> int:
    return _signed(int(node._saved_ignore_index))  # noqa: SLF001


def _next(node: Any) -> Any:
    return node.next_functions[0][0] if node is not None and node.next_functions else None


# ---- rows -----------------------------------------------------------------------------------------------------------


class RowsOfTerm(NamedTuple):
    """Rows of one term of a loss, read from its graph.

    Args:
        first: sizes of dimensions in which its tensors may have their rows; parameters are left out.
        computes: some layer computes with data; else it is a term of parameters alone, as a penalty on weights is.
        factor: multiple of the mean over its elements, if constants determine it; else ``None``.
    """

    first: frozenset[int]
    computes: bool
    factor: float | None = None


def rows_of_terms(loss: Tensor) -> list[RowsOfTerm]:
    """Return the rows of each term of a loss, read from its graph; terms of one kind once.

    Not collective.
    """
    alike: dict[tuple[str, RowsOfTerm], int] = {}
    for term in _terms(loss.grad_fn):
        one = term.node.name(), _rows_below(term.node)._replace(factor=_factor_of_mean(term))
        alike[one] = alike.get(one, 0) + 1
    return [_of_several(found, number) for (_, found), number in alike.items()]


def _of_several(found: RowsOfTerm, number: int) -> RowsOfTerm:
    """A loop that adds a loss for each row has as many terms as there are rows."""
    if number == 1:
        return found
    factor = None if found.factor is None else found.factor * number
    return found._replace(first=found.first | {number}, factor=factor)


def _factor_of_mean(term: _Term) -> float | None:
    factors = [each for each in term.factors if each is not None]
    if term.functions or len(factors) < len(term.factors):
        return None
    if _is_mean(term.node):
        return math.prod(factors)
    return math.prod(factors) * math.prod(_sizes(term.node)[:1]) if _is_sum(term) else None


def _rows_below(start: Any) -> RowsOfTerm:
    pending, seen = [start], set[Any]()
    first, computes = set[int](), start.name() in _LOSSES
    while pending and len(seen) < 16 * _MANY:
        node = pending.pop()
        if node in seen or _is_parameter(node):
            continue
        seen.add(node)
        computes = computes or (_is_layer(node) and not _is_of_parameters(node))
        for output in getattr(node, "_input_metadata", ()):  # of the gradients that it takes
            shape = tuple(output.shape)
            first.update(shape[: 2 if len(shape) > 2 else 1])
        pending.extend(_inner(node))
    return RowsOfTerm(frozenset(first), computes)


def outputs_below(loss: Tensor, outputs: Container[Any]) -> tuple[set[Any], bool]:
    """Return which of some outputs of models a loss is computed from, and whether it is from other data too.

    Not collective.

    Args:
        loss: with its graph.
        outputs: autograd nodes.
    """
    found = set[Any]()
    visited: dict[Any, None] = {}
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        if node in outputs:
            found.add(node)
            continue
        visited[node] = None
        pending.extend(_inner(node))
    if not found:
        return found, False
    # A layer that the script itself calls on an output is none that other data enters.
    reach, grows = set(found), True
    while grows:
        above = {node for node in visited if node not in reach and not reach.isdisjoint(_inner(node))}
        reach |= above
        grows = bool(above)
    return found, any(_takes_data(node) for node in visited if node not in reach)


def _takes_data(node: Any) -> bool:
    """Whether it is a layer that is given data, which needs no gradient."""
    if _base(node.name()) in _LOOKUPS:
        return True
    # An engine may compute a layer in a function of Python, as ZeRO does at stage 3.
    is_layer = _is_layer(node) or isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_layer and any(edge is None for edge, _ in node.next_functions)


def _is_layer(node: Any) -> bool:
    base = _base(node.name())
    normalises = "Norm" in base[1:] and not base.startswith("Linalg")
    return base in _LAYERS or "Convolution" in base or "Rnn" in base or normalises


def _is_of_parameters(node: Any) -> bool:
    """Whether a layer is given nothing but parameters, as the product of a matrix with itself in a penalty."""
    lookup = _base(node.name()) in _LOOKUPS
    return not lookup and all(isinstance(_leaf(edge), nn.Parameter) for edge, _ in node.next_functions)


def targets_of_terms(loss: Tensor) -> Iterator[tuple[Any, Tensor | None]]:
    """The node of each term of a loss, and the labels or targets that it was computed with, where it saves them."""
    for term in _terms(loss.grad_fn):
        node = term.node
        yield node, node._saved_target if node.name() in _NLL | _BY_ELEMENTS else None  # noqa: SLF001 (torch documents it)


def computes_with_data(node: Any) -> bool:
    """Whether some layer below a node computes with data; else it is of parameters alone, as a penalty is."""
    return _rows_below(node).computes


class Factors(NamedTuple):
    """Factors of a loss.

    Args:
        rows: of this rank's batch.
        total: rows of the batches of all ranks.
        terms: of each mean its node's name and the numbers that it is multiplied by.
    """

    rows: int
    total: int
    terms: tuple[tuple[str, tuple[float, ...]], ...]


def factors_of_means(loss: Tensor, rows: int, total: int) -> Factors:
    """Return what the means in a loss over a batch are multiplied by, as far as the graph holds numbers."""
    terms = [] if loss.grad_fn is None else [term for term in _terms(loss.grad_fn) if _is_mean(term.node)]
    known = [(term.node.name(), term.factors) for term in terms if not term.functions and None not in term.factors]
    return Factors(rows, total, tuple(known))  # type: ignore[arg-type]


def constants_of(loss: Tensor) -> tuple[float, ...]:
    """Return what all rows of a loss are multiplied by alike: numbers, tensors of one element, weights of classes.

    Terms of parameters alone, as a penalty, are left out: ranks may average multiples of them. A tensor on a device is
    read, which waits for it.
    """
    found: list[float] = []
    for term in () if loss.grad_fn is None else _terms(loss.grad_fn):
        numbers = [factor for factor in term.factors if factor is not None]
        numbers += [number for product in term.tensors for number in _one_number(_constant(product))]
        node = term.node
        while node is not None:
            numbers += _weights_of_classes(node)
            name, inner = node.name(), _inner(node)
            if name in _PRODUCTS and len(inner) == 1 and not (name.startswith("Div") and _divides_by(node)):
                numbers += _one_number(_constant(node))
            elif not (_is_mean(node) or name in _VIEWS | _SUMS or name == "NegBackward0"):
                break
            node = inner[0] if inner else None
        if numbers and _is_of_data(term.node):
            found += numbers
    return tuple(found)


def _is_of_data(start: Any) -> bool:
    """Whether a layer that is given data, or a loss function with targets, lies below a node."""
    pending, seen = [start], set[Any]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() in _LOSSES or _takes_data(node):
            return True
        pending.extend(_inner(node))
    return False


def _one_number(constant: Any) -> list[float]:
    if isinstance(constant, Tensor):
        return [float(constant)] if constant.numel() == 1 and not constant.is_complex() else []
    return [float(constant)] if isinstance(constant, int | float) else []


def _weights_of_classes(node: Any) -> list[float]:
    weights = getattr(node, f"_saved_{_WEIGHTED_BY_CLASS.get(node.name())}", None)
    if not isinstance(weights, Tensor) or weights.numel() > _MANY:
        return []
    return [float(weight) for weight in weights.flatten().tolist()]


def is_multiplied_by(loss: Tensor, number: int) -> bool:
    """Whether a loss, or a term of it, has a factor that is a multiple of a number, as far as the graph tells."""
    terms = () if loss.grad_fn is None else _terms(loss.grad_fn)
    factors = [factor for term in terms for factor in term.factors if factor]
    return any(_is_multiple(factor, number) for factor in factors)


def weighs_by_rows(one: Factors, other: Factors, ranks: int) -> Literal["no", "by all", "by something"]:
    """Whether a script multiplies a mean by the rows of this rank, which makes it a sum over them.

    That is seen where two batches of different sizes are multiplied by different numbers, as many times larger as the
    batch is; with one batch alone ``len(x) / batch_size`` is a number like any other.

    Args:
        one, other: of losses of one kind over two batches.
        ranks: data-parallel ranks. Where a factor is a multiple of them, the script means the number as it is.

    Returns:
        What it divides by: the rows of all ranks (or nothing), so that it counts on a sum over ranks; or a number that
        may be of this rank's rows in several batches. ``"no"`` also where the mean over ranks is what it means.
    """
    if one.rows == other.rows or [name for name, _ in one.terms] != [name for name, _ in other.terms]:
        return "no"
    largest = max(one.total, other.total)
    for (_, before), (_, after) in zip(one.terms, other.terms, strict=True):
        if len(before) != len(after):
            continue
        for number, (was, is_now) in enumerate(zip(before, after, strict=True)):
            by_row = is_now / other.rows
            if not was or not math.isclose(was / one.rows, by_row, rel_tol=1e-6):
                continue
            others = after[:number] + after[number + 1 :]
            if any(factor == 0 or _is_multiple(factor, ranks) for factor in others):
                continue
            is_count = math.isclose(by_row, 1.0, rel_tol=1e-6)
            if is_count and not others:
                return "by all"
            times = by_row * largest * (math.prod(others) if is_count else 1.0)
            if math.isclose(times, 1.0, rel_tol=1e-6):
                return "by all"
            if not math.isclose(times / ranks, max(round(times / ranks), 1), rel_tol=1e-6):
                return "by something"
    return "no"


class NoMean(NamedTuple):
    """Reason why a loss is not the mean of what the rows of its batch give each.

    Args:
        why: as part of a sentence about the rows.
        rows_meet: they are compared or combined before they are reduced.
        normalised: they are weighed by numbers that were normalised over them.
        divided_by: number that a sum is divided by, which may be of the items of all ranks; 0 where there is none.
    """

    why: str
    rows_meet: bool = False
    normalised: bool = False
    divided_by: float = 0.0


def is_of_all_ranks(loss: Tensor) -> bool:
    """Whether a loss is computed of the rows of all data-parallel ranks, which ``gather`` has joined with gradients.

    The mean of such losses over ranks is each of them. Reads the first nodes of the graph. Local.
    """
    following, seen = deque([loss.grad_fn]), set[Any]()
    while following and len(seen) < _MANY:
        node = following.popleft()
        if node is None or node in seen:
            continue
        if node.name() == "GatherWithGradientsBackward":
            return True
        seen.add(node)
        following.extend(_inner(node))
    return False


def why_no_mean_of_rows(loss: Tensor, rows: int, ranks: int = 1) -> NoMean | None:
    """Return why a loss is not the mean of what its rows give each, so that a mean over ranks is another number.

    Not collective. Waits for the device where a mean over labels may leave some out, and where rows have weights. Where
    the graph does not tell, the answer is ``None``.

    Args:
        loss: 0-d, with its graph.
        rows: of the batch. Of a single one all that may be told is that a mask leaves some of its elements out.
        ranks: data-parallel ranks. A sum that is multiplied by them (or a multiple) is meant as it is.
    """
    terms = [term for term in _terms(loss.grad_fn) if not (_is_sum_of_any(term.node) and _is_meant(term, ranks))]
    if rows == 1:
        return next((found for term in terms if (found := _why_divided(term, rows))), None)
    return _why_no_mean_of_several(terms, rows)


def _why_no_mean_of_several(terms: Sequence[_Term], rows: int) -> NoMean | None:
    sizes: dict[tuple[str, int], int] = {}
    divisors: dict[tuple[str, int], float] = {}
    functions: dict[str, int] = {}
    for term in terms:
        node, name = term.node, term.node.name()
        if not _rows_below(node).computes:
            continue  # Of parameters alone, as a penalty on weights.
        if _is_function_of_a_number(node):
            functions[name] = functions.get(name, 0) + 1
            continue
        if name in _NLL and bool((node._saved_target == _ignored(node)).any()):  # noqa: SLF001 (torch documents them)
            return NoMean("it leaves labels out")
        if why := _how_rows_meet(node, rows):
            return NoMean(why, rows_meet=True)
        if any(_is_normalised(each, rows) for each in term.tensors) or _has_normalised_weights(node, rows):
            return NoMean("it weighs them by numbers that were normalised over them", normalised=True)
        if name in _WITH_TARGETS and _has_normalised_targets(node, rows):
            return NoMean("it compares them with targets that were normalised over them", normalised=True)
        number = _num_averaged(node, rows)
        if divided := _why_divided(term, rows):
            return divided
        if number and not (_is_sum_of_any(node) and any(by % rows == 0 for by in term.divisors)):
            sizes[name, number] = sizes.get((name, number), 0) + number
            divisors[name, number] = _divided_by(term)
    # A loop may add a loss for each row.
    if of_all := next((name for name, number in functions.items() if number % rows), ""):
        return NoMean(f"{_base(of_all).lower()}() of a number that all of them give together")
    odd = next((kind for kind, number in sizes.items() if number % rows), None)
    return NoMean(f"it is over {sizes[odd]} elements", divided_by=divisors[odd]) if odd else None


def _num_averaged(node: Any, rows: int) -> int:
    """Elements that a term reduces, where they are not losses by themselves, as those of several tasks are."""
    number, below = _num_reduced(node), _next(node)
    if below is not None and below.name() in _MEANS | _SUMS and _is_along_rows(below, rows):
        number *= rows  # A mean over classes, of means over rows.
    return 0 if number % rows and _is_of_numbers(node) else number


def _is_of_numbers(node: Any) -> bool:
    """Whether the elements that a term reduces were stacked from numbers."""
    pending, seen = _inner(node), set[Any]()
    while pending and len(seen) < _MANY:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.name() == "StackBackward0" and all(_is_scalar(one) for one in _inner(each)):
            return True
        if each.name() in _LINEAR | _PRODUCTS | _ELEMENTWISE:
            pending.extend(_inner(each))
    return False


def _is_sum_of_any(node: Any) -> bool:
    """Whether it is a sum over elements, a loss function's too, or the one number of a product with a constant."""
    name = node.name()
    return name in _SUMS or _contracts(node) or (name in _LOSSES and node._saved_reduction == _SUM)  # noqa: SLF001


def _is_meant(term: _Term, ranks: int) -> bool:
    """Whether a term is multiplied by the ranks over which losses are averaged."""
    return ranks > 1 and any(factor is not None and _is_multiple(factor, ranks) for factor in term.factors)


def _why_divided(term: _Term, rows: int) -> NoMean | None:
    """Say which number, not that of this rank's rows, a term is divided by; ``None`` where there is none."""
    if _counts_by_mask(term, rows):
        return NoMean("it is divided by the number of elements that a mask leaves")
    if _is_sum_of_any(term.node) and rows > 1 and any(float(by) % rows for by in _tensors_divided_by(term)):
        return NoMean("it is a sum, divided by a number that is not theirs", divided_by=_divided_by(term))
    return None


def _divided_by(term: _Term) -> float:
    """Return what a sum is divided by, a number or a tensor of one; 0 where that is nothing."""
    if not _is_sum_of_any(term.node):
        return 0.0
    tensors = _tensors_divided_by(term)
    return float(tensors[0]) if tensors else next((1.0 / each for each in term.factors if each and each < 1), 0.0)


def _tensors_divided_by(term: _Term) -> list[Tensor]:
    """Return what a term is divided by where that is one number in a tensor, as a count of what a mask leaves is."""
    divisors = [_constant(each) for each in term.tensors if each.name().startswith("Div")]
    return [by for by in divisors if isinstance(by, Tensor) and by.numel() == 1]


def _contracts(node: Any) -> bool:
    """Whether it is the one number that a product of matrices or vectors with a constant gives: a sum with weights."""
    return _base(node.name()) in {"Bmm", "Dot", "Mm", "Mv"} and _is_scalar(node) and len(_inner(node)) == 1


def _counts_by_mask(term: _Term, rows: int) -> bool:
    """Whether a sum or mean of masked elements is divided by how many, or what part, the mask leaves, by values.

    Not if it leaves as many in each of several rows, as it then does in each batch.
    """
    name, divisors = term.node.name(), _tensors_divided_by(term)
    if not divisors or name not in _SUMS | _MEANS:
        return False
    node, mask = _next(term.node), None
    for _ in range(16):
        if node is None or len(_inner(node)) != 1:
            break
        constant: Any = _constant(node) if node.name() in _PRODUCTS and not _is_packed(node) else None
        if _is_mask(constant):
            mask = constant.detach().double()
            break
        node = _next(node)
    if mask is None:
        return False
    left = mask.mean() if name in _MEANS else mask.sum()
    if mask.dim() != len(_sizes(term.node)) or mask.shape[0] % rows or (rows > 1 and mask.shape[0] == 1):
        return False  # Of features, the same for every row.
    each = mask.reshape(rows, -1).sum(1)
    if rows > 1 and bool((each == each[0]).all()):
        return False
    return any(math.isclose(float(by), float(left), rel_tol=1e-5) for by in divisors)


def _is_function_of_a_number(node: Any) -> bool:
    """Whether a node is not linear in one number that the batch gives; functions of Python may be anything."""
    name = node.name()
    if not _is_scalar(node):
        return False
    if name in _PRODUCTS:
        return _data_branches(node) > 1
    if name in _LINEAR_IN_A_NUMBER | _MEANS | _SUMS | _LOSSES or not name[-1].isdigit() or _is_layer(node):
        return False
    places = [place for place, (edge, _) in enumerate(node.next_functions) if edge is not None]
    return all(math.prod(_shape_given(node, place)) == 1 for place in places)


def _how_rows_meet(start: Any, rows: int) -> str:
    """Say how a term joins rows before it is reduced; empty where it does not, or where the graph does not tell.

    Reads up to the last layer of each model, since what a model does with its batch is its own.
    """
    pending, seen = [(start, True)], set[Any]()
    while pending and len(seen) < _MANY:
        node, linear = pending.pop()
        if node in seen or _is_parameter(node):
            continue
        seen.add(node)
        name, base, inner = node.name(), _base(node.name()), _inner(node)
        if _pairs_rows(node, rows):
            return "it compares them with one another"
        if _is_layer(node):
            continue
        mixes = base in _MIXING or name in _OVER_ROWS or (name in _MEANS | _SUMS and not linear)
        if mixes and _is_along_rows(node, rows):
            return f"{base.lower()}() goes over all of them"
        # A factor that is trained beside the rows, as the weight of a task is, leaves a mean linear in them.
        by_one = name in _PRODUCTS and (len(inner) == 1 or _data_branches(node) < 2)
        linear = linear and (name in _LINEAR | _MEANS | _SUMS or by_one)
        pending.extend((each, linear) for each in inner)
    return ""


def _has_normalised_weights(start: Any, rows: int) -> bool:
    """Whether rows of a term have constant weights that were normalised over them. Reads up to the last layer."""
    pending, seen = [start], set[Any]()
    while pending and len(seen) < _MANY:
        node = pending.pop()
        if node in seen or _is_layer(node) or _is_parameter(node):
            continue
        seen.add(node)
        inner = _inner(node)
        if node.name() in _PRODUCTS and len(inner) == 1 and _is_normalised(node, rows):
            return True
        pending.extend(inner)
    return False


def _is_normalised(product: Any, rows: int) -> bool:
    """Whether a product's constant has a weight for each row, of mean 0 and deviation 1, of mean 1, or of sum 1.

    Two values alone may be so by chance, as labels of -1 and 1 and masks of a dropout are.
    """
    weights = None if _is_packed(product) else _constant(product)
    if not isinstance(weights, Tensor) or weights.numel() != rows or not weights.is_floating_point():
        return False
    weights = weights.detach().double().flatten()
    if len(set(weights.tolist())) < 3:
        return False
    total, near = float(weights.sum()), 1e-4
    if math.isclose(total, 1.0, rel_tol=near) or math.isclose(total, rows, rel_tol=near):
        return True
    square = float(weights.square().sum())  # With a mean of 0: the deviation's square, times rows or one less.
    return abs(total) < near * rows and any(math.isclose(square, by, rel_tol=1e-3) for by in (rows, rows - 1))


def _has_normalised_targets(node: Any, rows: int) -> bool:
    """Whether a loss function's targets have mean 0 and deviation 1 over the rows."""
    raw = getattr(node, "_raw_saved_target", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return False
    target = node._saved_target  # noqa: SLF001 (torch documents them)
    return bool(target.dim()) and target.shape[0] == rows and is_standardised(target.detach())


def _is_packed(product: Any) -> bool:
    """Whether hooks keep a product's constant, as a checkpoint's that would recompute it do, or torch does not tell."""
    name = "self" if product.next_functions[0][0] is None else "other"
    saved = getattr(product, f"_raw_saved_{name}", None)
    return getattr(saved, "unpack_hook", saved) is not None


def how_rows_meet_in_model(loss: Tensor, rows: int, *, batch_norms: bool = True) -> str:
    """Say how a model joins rows of its batch in forward, as part of a sentence; empty where the graph does not tell.

    Not collective. What autograd does not follow, such as statistics of the input or detached ones, is not seen. A dim
    is taken for that of the rows if it has as many entries and no other has.

    Args:
        loss: 0-d, with its graph.
        rows: of the batch, at least 2.
        batch_norms: those count too.
    """
    pending, seen = [(loss.grad_fn, False, False)], set[Any]()
    while pending and len(seen) < 64 * _MANY:
        state = pending.pop()
        node, in_model, exchanged = state
        if state in seen or _is_parameter(node):
            continue
        seen.add(state)
        if in_model and not exchanged and (why := _how_it_joins(node, rows, batch_norms)) and computes_with_data(node):
            return why
        in_model = in_model or _is_layer(node)
        # A function of Python that is given statistics, not rows, may take those of all ranks.
        exchanged = exchanged or isinstance(node, torch.autograd.function.BackwardCFunction)
        pending.extend((each, in_model, exchanged and _shape(each)[:1] != (rows,)) for each in _inner(node))
    return ""


def _how_it_joins(node: Any, rows: int, batch_norms: bool) -> str:
    base = _base(node.name())
    if base.endswith("BatchNorm"):
        return "it normalises by statistics of the batch" if batch_norms and _normalises_rows(node, rows) else ""
    if base in ("Baddbmm", "Bmm") or base.startswith("ScaledDotProduct"):
        return "they attend to one another" if _attends(node, rows) else ""
    if base in _OVER_ALL:
        alone = _sizes_reduced(node)[1:].count(rows) == 0
        name = base.removeprefix("Linalg").lower()
        return f"{name}() goes over all of them" if alone and _is_along_rows(node, rows) else ""
    return "it compares them with one another" if _pairs_rows(node, rows) else ""


def _normalises_rows(node: Any, rows: int) -> bool:
    return bool(getattr(node, "_saved_training", True)) and _shape_given(node)[:1] == (rows,)


def _attends(node: Any, rows: int) -> bool:
    """Whether attention has a weight for each pair of rows, and none of the dims before can be theirs."""
    attention = _base(node.name()).startswith("Scaled")
    one = _shape_given(node, 1 if _base(node.name()) == "Baddbmm" else 0)  # queries, or weights
    weights = (*one[-2:-1], *_shape_given(node, 1)[-2:-1]) if attention else one[-2:]
    return weights == (rows, rows) and all(size % rows for size in one[:-2]) and _data_branches(node) > 1


def _pairs_rows(node: Any, rows: int) -> bool:
    """Whether a node has an entry for each pair of rows, of which both are computed."""
    if _shape(node)[:2] != (rows, rows) or _data_branches(node) < 2:
        return False
    if _base(node.name()) in ("Addmm", "Cdist", "EuclideanDist", "Mm"):
        return len(_shape(node)) == 2
    shapes = sorted(_shape(each)[:2] for each in _inner(node))
    return node.name() in _ADDS | _PRODUCTS and shapes == [(1, rows), (rows, 1)]


def _is_along_rows(node: Any, rows: int) -> bool:
    """Whether a reduction is over the first dim, and that has as many entries as the batch has rows."""
    sizes = _sizes_reduced(node)
    if not sizes or sizes[0] != rows:
        return False
    return not hasattr(node, "_saved_dim") or 0 in _dims(node, len(sizes))


def _sizes_reduced(node: Any) -> tuple[int, ...]:
    """Shape of what a reduction is given."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return _shape_given(node) if sizes is None else tuple(sizes)


def _shape_given(node: Any, place: int = 0) -> tuple[int, ...]:
    """Shape of an operand. What a node saves would tell it too, but to read that may recompute a checkpoint."""
    given, number = node.next_functions[place]
    outputs = getattr(given, "_input_metadata", ())  # of the gradients that it takes
    return tuple(outputs[number].shape) if number < len(outputs) else ()


def _shape(node: Any) -> tuple[int, ...]:
    """Shape of a node's first output."""
    outputs = getattr(node, "_input_metadata", ())  # of the gradients that it takes
    return tuple(outputs[0].shape) if outputs else ()


def _is_scalar(node: Any) -> bool:
    return all(math.prod(output.shape) == 1 for output in getattr(node, "_input_metadata", ()))


def _data_branches(node: Any) -> int:
    return sum(_rows_below(each).computes for each in _inner(node))


def _num_reduced(node: Any) -> int:
    """Elements that a mean, a sum or a loss function reduces to one; 0 for other nodes."""
    name = node.name()
    if name in _MEANS | _SUMS and _is_scalar(node):
        return math.prod(node._saved_self_sym_sizes)  # noqa: SLF001 (torch documents them)
    return int(node._saved_self.numel()) if name in _BY_ELEMENTS else 0  # noqa: SLF001


# ---- leaves ---------------------------------------------------------------------------------------------------------


def leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors whose gradients a backward of ``loss`` accumulates, as far as autograd's own graph shows them."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            yield node.variable  # type: ignore[attr-defined]
        pending.extend(_inner(node))


# ---- sums -----------------------------------------------------------------------------------------------------------


def sums_over_batch(loss: Tensor, rows: int, ranks: int, samples: int = 0) -> bool:
    """Whether a loss has a term that is a sum over the rows of this rank's batch and is not divided by their number.

    Reads the values of constants only where it finds such a sum. Local.

    Args:
        loss: one number, with its graph.
        rows: of this rank's batch. A sum over one row is its mean, and never found.
        ranks: data-parallel ranks. A sum that is multiplied by them (or a multiple) is meant as it is.
        samples: of the data set; 0 where that is not known. A sum times ``samples / rows`` estimates that of all of
            them: its mean over ranks is what one process gives, since smaller batches are multiplied by more.
    """
    if rows < 2 or loss.grad_fn is None:
        return False
    terms = list(_terms(loss.grad_fn))
    return any(
        ((_is_sum(term) and not _is_scaled(term, rows, ranks, samples)) or _is_weighted_by_rows(term, rows, ranks))
        and _has_rows(term.node, rows)
        and _comes_from_batch(term.node, rows, term.divisors)
        for term in terms
    ) or _adds_rows(terms, rows, ranks, samples)


def _is_sum(term: _Term) -> bool:
    """Whether it is a sum whose factors are all known."""
    name = term.node.name()
    is_sum = name in _SUMS or (name in _LOSSES and term.node._saved_reduction == _SUM)  # noqa: SLF001
    return is_sum and not term.functions and None not in term.factors


def _is_weighted_by_rows(term: _Term, rows: int, ranks: int) -> bool:
    """Whether it is a mean times the rows of this rank, divided by those of all: a sum over a constant number."""
    if not (_is_mean(term.node) and float(rows) in term.factors and rows * ranks in term.divisors):
        return False
    others = list(term.factors)
    others.remove(float(rows))
    return not any(factor is None or factor == 0 or _is_multiple(factor, ranks) for factor in others)


def _adds_rows(terms: Sequence[_Term], rows: int, ranks: int, samples: int) -> bool:
    """Whether a loop adds a loss for each row: as many terms of one kind, each of a single row, as there are rows."""
    alike: dict[Any, list[_Term]] = {}
    for term in terms:
        sizes = _sizes_of_row(term.node, rows)
        if sizes is not None and not term.functions:
            alike.setdefault((term.node.name(), sizes, term.factors, term.divisors), []).append(term)
    return any(
        len(several) % rows == 0
        and not _is_scaled(several[0], rows, ranks, samples)
        and not (None in several[0].factors and _normalised(several))
        and all(_comes_from_batch(term.node, rows) for term in several[:rows])
        for several in alike.values()
    )


def _normalised(terms: Sequence[_Term]) -> bool:
    """Whether the tensors that terms are multiplied by add up to 1, so that they are the weights of a mean."""
    total = 0.0
    for term in terms:
        weight = 1.0
        for node in term.tensors:
            constant = _constant(node)
            if not isinstance(constant, Tensor) or constant.numel() != 1:
                return True
            weight *= 1.0 / float(constant) if node.name().startswith("Div") and float(constant) else float(constant)
        total += weight
    return math.isclose(total, 1.0, rel_tol=1e-3) or total == 0


def _sizes_of_row(node: Any, rows: int) -> tuple[int, ...] | None:
    """Sizes of what a term reduces, where that may be one row of the batch; ``None`` elsewhere."""
    name = node.name()
    if name == "UnbindBackward0":
        return () if node._saved_dim == 0 and len(node._input_metadata) == rows else None  # noqa: SLF001
    if name == "SelectBackward0":
        sizes = tuple(node._saved_self_sym_sizes)  # noqa: SLF001
        return sizes if node._saved_dim == 0 and sizes[0] == rows else None  # noqa: SLF001
    if name not in _SUMS | _MEANS | _LOSSES:
        return None
    sizes = _sizes(node)
    return sizes if not sizes or sizes[0] % rows else None


def _sizes(node: Any) -> tuple[int, ...]:
    """Sizes of the operand of a sum, mean or loss; none for another node."""
    name = node.name()
    if name in _LOSSES:
        return tuple(node._saved_self.shape)  # noqa: SLF001
    return tuple(node._saved_self_sym_sizes) if name in _SUMS | _MEANS else ()  # noqa: SLF001


def _adds_scalars(node: Any) -> bool:
    """Whether its operand is one number, or several that were stacked, as those of several heads."""
    sizes, inner = node._saved_self_sym_sizes, _inner(node)  # noqa: SLF001
    if math.prod(sizes) == 1 or len(sizes) != 1 or not inner:
        return bool(math.prod(sizes) == 1)
    joins = inner[0].name()
    return bool(joins == "StackBackward0" or (joins == "CatBackward0" and len(inner[0].next_functions) == sizes[0]))


def _has_rows(node: Any, rows: int) -> bool:
    """Whether the first dimension of a sum's operand is the batch."""
    first = (*_sizes(node), 0)[0]
    if first == rows:
        return True
    for _ in range(16):
        inner = _inner(node)
        if len(inner) != 1:
            return False
        node = inner[0]
        name = node.name()
        if name == "SumBackward1":
            # Summed over the batch first, then over the rest.
            sizes = node._saved_self_sym_sizes  # noqa: SLF001
            return sizes[0] == rows and 0 in _dims(node, len(sizes))
        # Rows and words made one dimension, as of logits (batch, length, vocabulary).
        if name in _RESHAPES:
            sizes = node._saved_self_sym_sizes  # noqa: SLF001
            if len(sizes) > 1 and sizes[0] == rows and first == rows * sizes[1]:
                return True
        elif name in _LOSSES:
            if node._saved_reduction != 0:  # noqa: SLF001
                return False
        elif name not in _LINEAR and name not in _ELEMENTWISE:
            return False
    return False


def _is_scaled(term: _Term, rows: int, ranks: int, samples: int) -> bool:
    """Whether a factor shows that the sum is intended."""
    counts = _counts(_sizes(term.node), rows)
    known = [factor for factor in term.factors if factor is not None]
    if samples and any(math.isclose(abs(one) * rows, samples, rel_tol=1e-6) for one in (*known, math.prod(known))):
        return True
    if term.node.name() in _NLL:
        # Labels that do not count are left out of the number that a script divides by.
        counts.add(int((term.node._saved_target != _ignored(term.node)).sum()))  # noqa: SLF001
    return not counts.isdisjoint(term.divisors) or any(
        factor == 0 or _is_reciprocal(factor, counts) or _is_multiple(factor, ranks)
        for factor in term.factors
        if factor is not None
    )


def _is_multiple(factor: float, ranks: int) -> bool:
    return factor >= ranks and (factor / ranks).is_integer()


def _counts(sizes: Sequence[int], rows: int) -> set[int]:
    """Divisors that make a sum a mean: rows, or elements over some first dimensions."""
    return {rows, *(math.prod(sizes[: end + 1]) for end in range(len(sizes)))} - {0, 1}


def _is_reciprocal(factor: float, counts: set[int]) -> bool:
    return any(math.isclose(abs(factor) * count, 1.0, rel_tol=1e-6) for count in counts)


def _comes_from_batch(start: Any, rows: int, divisors: Sequence[int] = ()) -> bool:
    """Whether a sum's operand is computed row by row from a batch and not divided by the number of rows.

    A whole number among ``divisors`` may be the number of elements that a mask or an index leaves; without one it is
    no count of anything that is summed.
    """
    sizes = _sizes(start)
    counts = _counts(sizes, rows)
    may_be_count = any(1 < each <= math.prod(sizes) for each in divisors)
    pending = [(each, start.name() in _SUMS) for each in _inner(start)]
    seen: set[Any] = set()
    found = False
    while pending and len(seen) < _MANY:
        node, linear = pending.pop()
        name = node.name()
        if node in seen or name.endswith("AccumulateGrad"):
            continue
        seen.add(node)
        if _mixes_rows(node, linear=linear):
            return False
        if name in _PRODUCTS:
            inner = _inner(node)
            linear = linear and len(inner) == 1
            if linear and _normalises(node, counts):
                return False
            if may_be_count and len(inner) == 1 and _is_mask(_constant(node)):
                return False
        elif name in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            if _signed(node._saved_dim) % max(node._saved_result.dim(), 1) == 0:  # noqa: SLF001
                return False
            linear = False
        elif name in _LINEAR or name in _ELEMENTWISE or name in _OVER_DIMS:
            if may_be_count and name in _SELECTS:
                return False
            linear = linear and (name in _LINEAR or name in ("MeanBackward1", "SumBackward1"))
        else:
            says = _from_model(node, name, rows)
            if says is None:
                return False
            found = found or says
            continue
        pending.extend((each, linear) for each in _inner(node))
    return found


def _mixes_rows(node: Any, *, linear: bool) -> bool:
    """Whether an operation may put several rows of the batch into one number."""
    name = node.name()
    return (
        name in _MIXES_ROWS
        or _base(name) in _MIXING
        or (name in _OVER_DIMS and not _keeps_rows(node, linear=linear))
        or (name == "GatherBackward0" and _gathers_rows(node))
    )


def _gathers_rows(node: Any) -> bool:
    """Whether it picks along the dimension of the batch, which may have been moved to another place before."""
    dims = node._saved_index.dim()  # noqa: SLF001
    if not dims or _signed(int(node._saved_dim)) % dims == 0:  # noqa: SLF001
        return True
    below = _next(node)
    for _ in range(8):
        if below is None or below.name() not in _VIEWS:
            return False
        if below.name() == "PermuteBackward0":
            return True
        if below.name() == "TransposeBackward0" and 0 in (below._saved_dim0, below._saved_dim1):  # noqa: SLF001
            return True
        below = _next(below)
    return False


def _keeps_rows(node: Any, *, linear: bool) -> bool:
    """Whether a reduction keeps the batch dimension, or is itself part of the sum over it."""
    if linear and node.name() == "SumBackward1":
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        sizes = node._saved_self.shape  # noqa: SLF001
    return 0 not in _dims(node, len(sizes))


def _from_model(node: Any, name: str, rows: int) -> bool | None:
    """Whether a node that is not element-wise reads a batch; ``None`` where it may mix rows."""
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
    return _leaf(node) is not None


def _leaf(node: Any) -> Any:
    """The tensor whose gradient is accumulated that a matrix is, perhaps cast and transposed; else ``None``."""
    for _ in range(8):
        if node is None:
            return None
        if node.name().endswith("AccumulateGrad"):
            return node.variable
        if node.name() not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


def _factor(node: Any) -> tuple[float | None, int | None]:
    """The number that a node multiplies by, ``None`` for a tensor; and what it divides by, if a whole number."""
    number = _number(_constant(node))
    if number is None or not node.name().startswith("Div"):
        return number, None
    if number == 0:
        return None, None
    return 1.0 / number, int(number) if number > 1 and number.is_integer() else None


def _is_mask(constant: Any) -> bool:
    """Whether a factor of the elements leaves some of them out."""
    return isinstance(constant, Tensor) and constant.numel() > 1 and bool((constant == 0).any())


def _normalises(node: Any, counts: set[int]) -> bool:
    """Whether a constant factor of the elements may make a sum over them a mean."""
    constant = _constant(node)
    if constant is None:
        return True
    if not isinstance(constant, Tensor) or constant.numel() == 1:
        factor, divisor = _factor(node)
        return factor is None or factor == 0 or divisor in counts or _is_reciprocal(factor, counts)
    weights = constant.detach().double()
    if node.name().startswith("Div"):
        weights = weights.reciprocal()
    return math.isclose(float(weights.sum()), 1.0, rel_tol=1e-3)


def _constant(node: Any) -> Any:
    """The operand of a product that needs no gradient."""
    if node.next_functions[0][0] is None:
        # A quotient's numerator is not a factor.
        return None if node.name().startswith("Div") else node._saved_self  # noqa: SLF001
    return node._saved_other  # noqa: SLF001


def _divides_by(node: Any) -> bool:
    """Whether a quotient is nonlinear, since its divisor needs a gradient."""
    return node.next_functions[0][0] is None


def _number(constant: Any) -> float | None:
    """A Python number, which torch saves as a wrapped-number tensor without type promotion."""
    if isinstance(constant, int | float):
        return float(constant)
    if not isinstance(constant, Tensor) or constant.dim():
        return None
    small = torch.zeros((), dtype=torch.int8 if constant.dtype == torch.int64 else torch.float16)
    if constant.device.type != "cpu" or torch.result_type(constant, small) != small.dtype:
        return None
    return float(constant)


def _dims(node: Any, number: int) -> set[int]:
    """Dimensions of a reduction, all of them where it names none."""
    dims = node._saved_dim  # noqa: SLF001
    if dims is None or (isinstance(dims, tuple) and not dims):
        return set(range(number))
    return {_signed(dim) % max(number, 1) for dim in (dims if isinstance(dims, tuple) else (dims,))}


def _signed(number: int) -> int:
    # Autograd shows a signed integer as an unsigned one.
    return number - 2**64 if number >= 2**63 else number


def _inner(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]
