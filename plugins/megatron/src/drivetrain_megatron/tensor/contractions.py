"""Rules of matrix products and attention, by the letters of an einsum.

The letter of the sharded dim decides. If it is in the result, each rank computes its shard (a column-wise layer,
attention by heads). If it is summed over, each rank has a partial sum (a row-wise layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.randomness import own_stream
from drivetrain_megatron.tensor.sharded import (
    Sharded,
    by_gathering,
    complete,
    global_shape,
    local,
    rule,
    settled,
    sharded,
    whole,
)

_BATCH = "abcdefgh"
"""Letters of leading dims, from the right."""


def _letters(count: int, last: str) -> str:
    """Names of ``count`` dims that end in ``last``."""
    lead = count - len(last)
    return _BATCH[:lead][::-1] + last


def contract(
    operands: Sequence[Tensor],
    letters: Sequence[str],
    out: str,
    run: Callable[[list[Tensor]], Tensor],
    bias: Tensor | None = None,
) -> Any:
    """Run a contraction on what this rank holds. Collective where operands or the result need it.

    Args:
        operands: plain or sharded.
        letters: for each operand a letter for each dim; equal letters are one dim, of equal size or broadcast.
        out: the letters of the result.
        run: computes the local result of local operands, and of a local bias behind them where there is one to be
        added. bias: ``(n,)``, added along the last dim of the result.
    """
    operands = [settled(each) for each in operands]
    leading = _leading(operands)
    if leading is None:
        return run([*operands, *_bias(bias)])
    ring, spec = leading.ring, leading.spec
    letter = next(names for each, names in zip(operands, letters, strict=True) if each is leading)[spec.dim]
    own = [_fit(each, names, letter, leading) for each, names in zip(operands, letters, strict=True)]
    if letter not in out:
        return complete(run(own), ring, *_bias(bias))
    shape = tuple(_sizes(operands, letters)[name] for name in out)
    if bias is not None:
        own.append(_fit(bias, out[-1], letter, leading))
    return sharded(run(own), Layout(shape, out.index(letter), spec.parts), ring)


def _leading(operands: Sequence[Any]) -> Sharded | None:
    """Return the operand whose layout decides: a parameter before others."""
    found = [each for each in operands if isinstance(each, Sharded)]
    return next((each for each in found if each.owner), found[0] if found else None)


def _fit(operand: Tensor, names: str, letter: str, leading: Sharded) -> Tensor:
    """The local operand beside the leading one's part."""
    ring, parts = leading.ring, leading.spec.parts
    if isinstance(operand, Sharded):
        spec = operand.spec
        if names[spec.dim] == letter and spec.parts == parts:
            return local(operand)
        if letter not in names:
            return ring.gather_and_enter(local(operand), spec)
        operand = whole(operand)
    dim = names.find(letter)
    if dim < 0 or operand.shape[dim] == 1:
        return ring.enter(operand)
    return ring.cut(operand, Layout(tuple(operand.shape), dim, parts))


def _sizes(operands: Sequence[Tensor], letters: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for operand, names in zip(operands, letters, strict=True):
        for name, size in zip(names, global_shape(operand), strict=True):
            found[name] = max(found.get(name, 1), size)
    return found


def _bias(bias: Tensor | None) -> list[Tensor]:
    if bias is None:
        return []
    return [whole(bias) if isinstance(bias, Sharded) else bias]


@rule("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x (..., k) @ weight (n, k).T + bias (n)``."""
    x, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
    names = _letters(x.dim(), "k")
    if weight.dim() != 2:
        return by_gathering(func, args, kwargs)
    return contract([x, weight], [names, "nk"], names[:-1] + "n", lambda own: func(*own), bias)


@rule("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(..., m, k) @ (..., k, n)``, leading dims broadcast."""
    first, second = _arguments(args, kwargs, ("input", "other"))
    if func.__name__ == "__rmatmul__":
        first, second = second, first
    if second is None:
        second = kwargs.get("mat2")
    if min(first.dim(), second.dim()) < 2:
        return by_gathering(func, args, kwargs)
    names = _letters(first.dim(), "mk"), _letters(second.dim(), "kn")
    out = max(names[0][:-2], names[1][:-2], key=len) + "mn"
    return contract([first, second], names, out, lambda own: torch.matmul(*own))


@rule("addmm", "baddbmm")
def add_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``beta * added + alpha * first @ second``; for one batch, with a vector added, it is a layer with a bias."""
    added, first, second = _arguments(args, kwargs, ("input", "mat1", "mat2"))
    if first is None:
        first, second = kwargs["batch1"], kwargs["batch2"]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if (beta, alpha) == (1, 1) and added.dim() == 1:
        return contract([first, second], ["mk", "kn"], "mn", _rows_times, added)
    names = ["mk", "kn"] if first.dim() == 2 else ["bmk", "bkn"]
    product = contract([first, second], names, names[0][:-1] + "n", lambda own: torch.matmul(*own))
    with torch._C._EnableTorchFunction():  # noqa: SLF001 (torch has no public word for it)
        return product * alpha if beta == 0 else added * beta + product * alpha


def _rows_times(own: list[Tensor]) -> Tensor:
    return torch.mm(*own) if len(own) == 2 else torch.addmm(own[2], own[0], own[1])


@rule("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An equation in letters, without an ellipsis."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return by_gathering(func, args, kwargs)
    left, out = equation.replace(" ", "").split("->")
    return contract(operands, left.split(","), out, lambda own: torch.einsum(equation, *own))


@rule("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(s, k)`` in groups of rows against one matrix ``(e, k, n)`` for each group: experts."""
    x, weight, *rest = args
    if (x.dim(), weight.dim()) != (2, 3):
        return by_gathering(func, args, kwargs)

    def run(own: list[Tensor]) -> Tensor:
        rows, matrices = own
        if all(matrices.shape[dim] * matrices.element_size() % _ALIGNED == 0 for dim in (1, 2)):
            return func(rows, matrices, *rest, **kwargs)  # type: ignore[no-any-return]
        # The kernel does not support such widths, which a shard may have though the full tensor has not.
        ends = (rest[0] if rest else kwargs["offs"]).tolist()
        begins = [0, *ends[:-1]]
        products = [rows[begin:end] @ matrices[one] for one, (begin, end) in enumerate(zip(begins, ends, strict=True))]
        return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], matrices.shape[2])])

    return contract([x, weight], ["sk", "ekn"], "sn", run)


_ALIGNED = 16
"""Alignment of strides in bytes that torch's grouped product requires."""


@rule("scaled_dot_product_attention")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``query (..., t, d)``, ``key (..., s, d)``, ``value (..., s, e)`` by heads; a mask is cut where it has them."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, *rest = args + (None,) * (4 - len(args))
    given = dict(zip(names[4:], rest, strict=False)) | kwargs
    query, key, value, mask = (
        given.pop(name, each) for name, each in zip(names, (query, key, value, mask), strict=False)
    )
    operands = [_by_heads(each) for each in (query, key, value)]
    letters = [_letters(operands[0].dim(), "td"), _letters(operands[1].dim(), "sd"), _letters(operands[2].dim(), "se")]
    if mask is not None:
        operands.append(mask)
        letters.append(_letters(mask.dim(), "ts"))
    leading = _leading(operands)

    def run(own: list[Tensor]) -> Tensor:
        own_mask = own[3] if mask is not None else None
        if leading is None or not given.get("dropout_p"):
            return func(*own[:3], attn_mask=own_mask, **given)  # type: ignore[no-any-return]
        with own_stream(leading.ring, own[0]):
            return func(*own[:3], attn_mask=own_mask, **given)  # type: ignore[no-any-return]

    if leading is not None and not all(leading.ring.divides(_heads(each, leading), leading) for each in operands[:3]):
        return by_gathering(func, args, kwargs)
    return contract(operands, letters, letters[0][:-1] + "e", run)


def _by_heads(tensor: Tensor) -> Tensor:
    """Whole where it is cut along positions or features: attention needs all of them at once."""
    if isinstance(tensor, Sharded) and tensor.spec.from_right >= -2:
        return whole(tensor)
    return tensor


def _heads(tensor: Tensor, leading: Sharded) -> int:
    return global_shape(tensor)[leading.spec.from_right]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]
