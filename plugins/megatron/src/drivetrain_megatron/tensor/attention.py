"""Computes ``torch.nn.MultiheadAttention`` by single operations, so that rules and recordings see its heads.

Torch computes it in one function, which cannot be sharded inside. This one follows the documentation of that
module; attention is as in Vaswani et al., *Attention Is All You Need* (arXiv 1706.03762), section 3.2.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain_megatron.tensor.sharded import by_gathering, rule

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def can_follow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call uses only what :func:`multi_head_attention` does."""
    given = _given(args, kwargs)
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    return all(given[name] is None for name in extras) and not given["add_zero_attn"]


def multi_head_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute ``torch.nn.functional.multi_head_attention_forward`` by single operations.

    Returns:
        Output ``(L, N, E)`` or ``(L, E)``, and weights ``(N, L, S)``, ``(N, H, L, S)`` or without ``N``, if they are
        asked for.
    """
    given = _given(args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    single = query.dim() == 2
    if single:
        query, key, value = (each.unsqueeze(1) for each in (query, key, value))
    heads = given["num_heads"]
    q, k, v = (_heads(each, heads) for each in _projected(given, query, key, value))
    mask = _mask(given, q, single=single)
    dropout = given["dropout_p"] if given["training"] else 0.0
    if given["need_weights"]:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = F.dropout(weights, p=dropout) @ v if dropout else weights @ v
        told = weights.mean(1) if given["average_attn_weights"] else weights
        told = told.squeeze(0) if single else told
    else:
        mixed, told = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None
    batch, _, length, _ = mixed.shape
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, -1)
    output = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
    return (output.squeeze(1) if single else output), told


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _projected(given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    return [F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases, strict=True)]


def _heads(x: Tensor, heads: int) -> Tensor:
    """``(L, N, E)`` to ``(N, H, L, E / H)``."""
    length, batch, width = x.shape
    return x.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _mask(given: dict[str, Any], q: Tensor, *, single: bool) -> Tensor | None:
    """Both masks together, added to scores ``(N, H, L, S)``."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = _added(mask, q.dtype)
        if mask.dim() == 3:
            mask = mask.reshape(-1, given["num_heads"], *mask.shape[1:])
    if padding is not None:
        padding = _added(padding if not single or padding.dim() == 2 else padding.unsqueeze(0), q.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    found: Tensor | None = mask
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
    return mask.to(dtype)


@rule("multi_head_attention_forward")
def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not can_follow(args, kwargs):
        return by_gathering(func, args, kwargs)
    with torch._C._EnableTorchFunction():  # noqa: SLF001 (torch has no public word for it)
        return multi_head_attention(args, kwargs)
