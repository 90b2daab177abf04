"""How many items a mean loss is a mean over, read from the graph that autograd has recorded for it.

``cross_entropy`` and its kin keep their labels for the backward, with the label that they ignore and the kind of
reduction. What a script or a model of another library did before (shifted labels, flattened logits, masked some) is
done by then, so that the count is that of the loss itself, whatever made it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.errors import UsageError

_MEAN = 1
"""torch's number for ``reduction="mean"``."""

_NLL = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_BY_ELEMENTS = frozenset(
    {
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "SoftMarginLossBackward0",
        "KlDivBackward0",
    }
)
_MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
_SAME_VALUE = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "ToCopyBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
_VIEWS = frozenset({"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"})
_LINEAR = frozenset({"MulBackward0", "NegBackward0", "DivBackward0", "AddBackward0", "SubBackward0"})
_CURE = (
    "Pass a sum: accelerator.backward(loss_sum, num_items=n); or leave count_items out, which weighs each mean by its "
    "samples."
)


class _Term(NamedTuple):
    """A mean in the graph of a loss.

    Args:
        node: its node.
        functions: autograd functions of Python that lie between, and may compute anything.
        exact: only these lie between, so that the loss has the value of the mean.
    """

    node: Any
    functions: bool
    exact: bool


def count_items(loss: Tensor) -> Tensor | int:
    """How many items ``loss`` is a mean over, without waiting for the device unless it adds several means. Local.

    Args:
        loss: 0-d, with its graph: a mean as torch's loss functions compute it, or a multiple of one, or a sum of means
            over equally many items.

    Returns:
        The labels that count for a mean over labels (of a weighted one, the sum of their weights), else the elements.

    Raises:
        UsageError: the graph does not say.
    """
    found: list[_Term] = []
    node = loss.grad_fn
    if node is None or not _collect(node, found, functions=False, exact=True):
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
    """Whether a loss is a mean over more labels than its batch has samples, such as tokens. Does not raise. Local."""
    found: list[_Term] = []
    node = getattr(loss, "grad_fn", None)
    if node is None or not _collect(node, found, functions=False, exact=True):
        return False
    for term in found:
        name = term.node.name()
        if name not in _NLL:
            continue
        if name == "NllLoss2DBackward0" or (samples and term.node._saved_target.numel() > samples):  # noqa: SLF001
            return True
        before = _next(_next(term.node))
        # Logits of shape (batch, length, vocabulary), made two-dimensional.
        if before is not None and before.name() in _VIEWS and len(before._saved_self_sym_sizes) > 2:  # noqa: SLF001
            return True
    return False


def _collect(node: Any, found: list[_Term], *, functions: bool, exact: bool) -> bool:
    """Find the means that a loss is a linear function of; ``False`` where it is something else."""
    while True:
        name = node.name()
        if name in _NLL or name in _BY_ELEMENTS:
            found.append(_Term(node, functions, exact))
            return bool(node._saved_reduction == _MEAN)  # noqa: SLF001 (torch documents these names for looking at)
        if name in _MEANS and math.prod(node._saved_self_sym_sizes) > 1:  # noqa: SLF001
            found.append(_Term(node, functions, exact))
            return True
        edges = [edge for edge, _ in node.next_functions]
        inner = [edge for edge in edges if edge is not None]
        if name in _LINEAR:
            if name in ("AddBackward0", "SubBackward0") and len(inner) > 1:
                return all(_collect(each, found, functions=functions, exact=False) for each in inner)
            if len(inner) != 1 or (name == "DivBackward0" and edges[0] is None):
                return False
            exact = False
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            # An engine's, which hands the value on: that is looked at before it is believed.
            functions = True
        elif name not in _SAME_VALUE and name not in _MEANS:
            return False
        if len(inner) != 1:
            return False
        node = inner[0]


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
    index = int(node._saved_ignore_index)  # noqa: SLF001
    # Autograd shows the signed number as an unsigned one.
    return index - 2**64 if index >= 2**63 else index


def _next(node: Any) -> Any:
    return node.next_functions[0][0] if node is not None and node.next_functions else None
