"""Lets a trace run the kernels that an accelerator would run, where torch chooses them by the device.

Traces run on fake tensors of the CPU: autograd cannot run on those of a device that this build of torch does not know.
Almost all operators keep the same tensors everywhere. On an accelerator

- dropout keeps a mask of one byte an element, and on the CPU a tensor of the input's type;
- attention keeps no scores, and on the CPU it does with dropout or a mask;
- autocast computes powers, normalisations and losses in float32, and on the CPU few of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from drivetrain_planner.private_names import check

_ATEN = torch.ops.aten
Kernel = Callable[..., Any]
_LOW = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
"""Largest size of a head that flash attention takes."""
_ALIGNED_BYTES = 16
"""Memory-efficient attention reads so many bytes of a head at a time."""

_IN_FLOAT32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "layer_norm", "log", "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "nll_loss2d", "pdist",
    "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm", "rsqrt",
    "sinh", "smooth_l1_loss", "soft_margin_loss", "softplus", "tan", "triplet_margin_loss",
)  # fmt: skip
"""Operators that autocast computes in float32 on accelerators: https://docs.pytorch.org/docs/stable/amp.html"""
_INTO_FLOAT32 = (
    "cumprod", "cumsum", "linalg_vector_norm", "log_softmax.int", "prod", "prod.dim_int", "softmax.int", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""Likewise, where the operator itself takes the dtype of its result and none is asked for."""


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Run what this kind of device runs for operators of fake tensors, until the context ends.

    They stand in for the CPU's in this thread, also where C++ code calls them.

    Args:
        device_type: ``"cpu"`` changes nothing.

    Raises:
        BackendBlockedError: the installed torch lacks a private name that this needs.
    """
    if device_type == "cpu":
        yield
        return
    check()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        # Before autograd takes them apart.
        for name, kernel in (("scaled_dot_product_attention", _attention), ("dropout", _dropout)):
            library.impl(name, _in_this_thread(kernel, _composite(name)), "AutogradCPU")  # type: ignore[no-untyped-call]
        for names, made in ((_IN_FLOAT32, _in_float32), (_INTO_FLOAT32, _into_float32)):
            for name in names:
                # A few the CPU's autocast treats likewise.
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):  # noqa: SLF001
                    kernel = _in_this_thread(made(name), _below_autocast(name))
                    library.impl(name, kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 (torch's own tests end a library so)


def _operator(name: str) -> torch._ops.OpOverload[..., Any]:
    packet, _, overload = name.partition(".")
    found: torch._ops.OpOverload[..., Any] = getattr(getattr(_ATEN, packet), overload or "default")
    return found


def _composite(name: str) -> Kernel:
    """Return the operator's own kernel: a sequence of others."""
    return partial(_operator(name)._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)  # noqa: SLF001


def _in_this_thread(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """Kernels are those of the process; other threads keep theirs."""
    tracing = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        return (kernel if threading.get_ident() == tracing else otherwise)(*args, **kwargs)

    return run


def _below_autocast(name: str) -> Kernel:
    operator = _operator(name)
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):  # noqa: SLF001
            return operator(*args, **kwargs)

    return run


def _low(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _LOW


def _in_float32(name: str) -> Kernel:
    operator = _below_autocast(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda one: one.float() if _low(one) else one, (args, kwargs))
        return operator(*args, **kwargs)

    return run


def _into_float32(name: str) -> Kernel:
    operator, arguments = _below_autocast(name), _operator(name)._schema.arguments  # noqa: SLF001
    place = next(
        (i for i, each in enumerate(arguments) if each.name == "dtype" and not each.kwarg_only), len(arguments)
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args, kwargs["dtype"] = args[:place], args[place]
        if kwargs.get("dtype") is None and _low(args[0]):
            kwargs["dtype"] = torch.float32
        return operator(*args, **kwargs)

    return run


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    dropped: Tensor
    if train and 0.0 < p < 1.0:
        dropped = torch.native_dropout(x, p, train)[0]
    else:
        dropped = _composite("dropout")(x, p, train)
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose among torch's kernels in its order for CUDA: flash, memory-efficient, plain products."""
    causal = is_causal and query.shape[-2] == key.shape[-2]
    four = query.dim() == key.dim() == value.dim() == 4  # batch, heads, tokens, size of a head
    one_size = query.shape[-1] == value.shape[-1]
    result: Tensor
    if (
        four
        and one_size
        and attn_mask is None
        and query.dtype in _LOW
        and query.shape[-1] <= _FLASH_HEAD
        and causal == is_causal
    ):
        padded = [_padded(each) for each in (query, key, value)]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        result = _ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]  # noqa: SLF001
        return result[..., : query.shape[-1]]
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    aligned = all(one.shape[-1] * one.element_size() % _ALIGNED_BYTES == 0 for one in (query, value))
    if four and aligned and not grouped:
        result = _ATEN._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, _bias(attn_mask, query, key), True, dropout_p, is_causal, scale=scale
        )[0]
        return result
    result = _ATEN._scaled_dot_product_attention_math(  # noqa: SLF001
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _padded(x: Tensor) -> Tensor:
    """With heads of a multiple of eight elements, as flash attention is given them."""
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the bias that memory-efficient attention adds to scores: a mask of truth values becomes one of numbers."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])
