"""Rules of operations along dims: sums, norms, softmax, sorting. Along other dims each rank does its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.pointwise import align
from drivetrain_megatron.tensor.sharded import (
    Sharded,
    by_gathering,
    global_shape,
    local,
    operation,
    rule,
    settled,
    sharded,
    whole,
)
from drivetrain_megatron.tensor.views import like

_KEEPS = frozenset(
    """
    softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort flip roll normalize topk
    """.split()
)
"""The result has as many dims as the argument."""

_DIM_AT = {"topk": 2, "normalize": 2, "norm": 2, "roll": 2, "vector_norm": 2, "linalg_vector_norm": 2}
"""Position of the dim argument, if it is not the second."""


@rule(
    *"""
    softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort flip roll normalize topk prod
    amax amin max min argmax argmin var std var_mean std_mean norm any all median mode count_nonzero nansum nanmean
    aminmax vector_norm linalg_vector_norm sum mean logsumexp
    """.split()
)
def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations along given dims, or over all of them."""
    name, part = operation(func), settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    if len(args) > 1 and isinstance(args[1], Tensor):
        return by_gathering(func, args, kwargs)
    place = _DIM_AT.get(name, 1)
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", _default(name)))
    count = len(part.spec.shape)
    dims = set(range(count)) if given is None else {each % count for each in _as_sequence(given)}
    if part.spec.dim in dims:
        along_cut = _ALONG_CUT.get(name)
        found = None if along_cut is None else along_cut(part, dims, _keepdim(name, args, kwargs), kwargs.get("dtype"))
        return by_gathering(func, (part, *args[1:]), kwargs) if found is None else found
    keeps = name in _KEEPS or _keepdim(name, args, kwargs)
    dim = part.spec.dim if keeps else part.spec.dim - sum(each < part.spec.dim for each in dims)
    found = func(local(part), *args[1:], **kwargs)
    if isinstance(found, tuple):
        return type(found)(like(each, part, dim, part.spec.parts) for each in found)
    return like(found, part, dim, part.spec.parts)


def _default(name: str) -> int | None:
    return {"normalize": 1, "sort": -1, "argsort": -1, "topk": -1, "median": None}.get(name)


def _as_sequence(dims: Any) -> Sequence[int]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _keepdim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = 3 if name in {"norm", "vector_norm", "linalg_vector_norm"} else 2
    positional = args[at] if len(args) > at and name not in {"var", "std", "var_mean", "std_mean"} else False
    return bool(kwargs.get("keepdim", positional))


# Along the cut dim, where the result is small and can be put together from the parts' results.


def _sum(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    return complete_small(local(part).sum(tuple(dims), keepdim=keepdim, dtype=dtype), part)


def _mean(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    count = torch.Size([part.spec.shape[dim] for dim in dims]).numel()
    return complete_small(local(part).sum(tuple(dims), keepdim=keepdim, dtype=dtype) / count, part)


def _logsumexp(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    if dims != {part.spec.dim} or not part.spec.even(part.ring.size):
        return None
    values = local(part)
    highest = part.ring.largest(values.amax(part.spec.dim, keepdim=True))
    total = complete_small((values - highest).exp().sum(part.spec.dim, keepdim=True), part)
    found = total.log() + highest
    return found if keepdim else found.squeeze(part.spec.dim)


def _softmax(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    logs = _log_softmax(part, dims, keepdim, dtype)
    return None if logs is None else sharded(local(logs).exp(), part.spec, part.ring)


def _log_softmax(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    values = sharded(local(part) if dtype is None else local(part).to(dtype), part.spec, part.ring)
    total = _logsumexp(values, dims, True, None)
    return None if total is None else sharded(local(values) - part.ring.enter(total), part.spec, part.ring)


def _argmax(part: Sharded, dims: set[int], keepdim: bool, dtype: torch.dtype | None) -> Any:
    """Candidates of all ranks: value and index in the whole dim."""
    spec, ring = part.spec, part.ring
    if dims != {spec.dim} or spec.parts is not None or not spec.even(ring.size):
        return None
    start, _ = spec.spans(ring.rank, ring.size)[0]
    value, index = local(part).detach().max(spec.dim, keepdim=True)
    each = Layout((*value.shape[: spec.dim], ring.size, *value.shape[spec.dim + 1 :]), spec.dim)
    values, indices = ring.collect(value, each), ring.collect(index + start, each)
    found = indices.gather(spec.dim, values.argmax(spec.dim, keepdim=True))
    return found if keepdim else found.squeeze(spec.dim)


_ALONG_CUT = {
    "sum": _sum,
    "mean": _mean,
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "argmax": _argmax,
}


def complete_small(partial: Tensor, part: Sharded) -> Tensor:
    """A sum over ranks that is plain in any case, sequence parallelism too."""
    return part.ring.sum(partial)


@rule("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "take_along_dim")
def by_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements picked from or put along a dim that is not the cut one, the index being as long along the cut one."""
    names = ("input", "indices", "dim") if operation(func) == "take_along_dim" else ("input", "dim", "index", "src")
    given = dict(zip(names, args, strict=False)) | kwargs
    part, dim = settled(given.get("input")), given.get("dim")
    if not isinstance(part, Sharded) or not isinstance(dim, int) or dim % len(part.spec.shape) == part.spec.dim:
        return by_gathering(func, args, kwargs)
    others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor)]
    place = part.spec.from_right
    if any(global_shape(each)[place] != part.spec.length for each in others):
        return by_gathering(func, args, kwargs)
    own = [align(settled(each), part, place) if isinstance(each, Tensor) else each for each in args[1:]]
    own_kwargs = {
        name: align(settled(each), part, place) if isinstance(each, Tensor) else each for name, each in kwargs.items()
    }
    found = func(local(part), *own, **own_kwargs)
    return args[0] if operation(func).endswith("_") else like(found, part, part.spec.dim, part.spec.parts)


@rule("layer_norm", "rms_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms over the last dims; gain and bias are the same for every part."""
    x, shape, weight, bias, *rest = args + (None,) * (4 - len(args))
    given = dict(kwargs)
    rms = operation(func) == "rms_norm"
    if rms:  # It has no bias: the fourth argument is eps.
        rest, bias = ([] if bias is None else [bias]), None
    weight, bias = given.pop("weight", weight), given.pop("bias", bias)
    part = settled(given.pop("input", x))
    shape = given.pop("normalized_shape", shape)
    gains = [weight] if rms else [weight, bias]
    if not isinstance(part, Sharded) or part.spec.from_right >= -len(shape):
        value = whole(part) if isinstance(part, Sharded) else part
        if isinstance(part, Sharded):
            return by_gathering(func, (part, shape, *gains, *rest), given)
        return func(
            value, shape, *(whole(each) if isinstance(each, Sharded) else each for each in gains), *rest, **given
        )
    ring = part.ring
    own = [None if each is None else ring.enter(whole(each) if isinstance(each, Sharded) else each) for each in gains]
    return sharded(func(local(part), shape, *own, *rest, **given), part.spec, ring)


@rule("tril", "triu")
def triangle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A triangle of the last two dims."""
    part = settled(args[0])
    if not isinstance(part, Sharded):
        return func(part, *args[1:], **kwargs)
    if part.spec.from_right >= -2:
        return by_gathering(func, (part, *args[1:]), kwargs)
    return sharded(func(local(part), *args[1:], **kwargs), part.spec, part.ring)
