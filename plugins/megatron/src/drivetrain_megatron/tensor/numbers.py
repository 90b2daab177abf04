"""Makes scalar reads of DTensors return the value of the full tensor.

A sum over a ``DTensor``, such as ``(parameter.grad ** 2).sum()``, is a ``DTensor`` that is still to be reduced over
the ranks. Torch returns this rank's partial sum for ``float(...)`` of it, without a warning. What
``torch.nn.utils.clip_grad_norm_`` calls refuses lists in which some tensors are parts and some are whole, as gradients
are under ``tp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def read_whole_numbers() -> None:
    """Let ``float(tensor)`` and ``tensor.item()`` of a ``DTensor`` return the full tensor's value in this process.

    They become collective over the tensor's mesh. May be called twice.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 (torch's own table of exceptions)
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _whole_number)  # noqa: SLF001
    aten = torch.ops.aten
    handlers.setdefault(aten._foreach_norm.Scalar, _whole_norms)  # noqa: SLF001
    for op in (
        aten._foreach_mul_.Tensor,
        aten._foreach_mul_.Scalar,
        aten._foreach_clamp_min_.Scalar,
        aten._foreach_clamp_max_.Scalar,
    ):
        handlers.setdefault(op, _on_parts)


def _whole_number(op: Any, args: Any, kwargs: Any) -> Any:
    del kwargs
    return op(args[0].full_tensor())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_norms(op: Any, args: Any, kwargs: Any) -> Any:
    """The norm of each whole tensor, on every rank."""
    del op
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [_whole(torch.linalg.vector_norm(one, order, dtype=dtype)) for one in tensors]


def _on_parts(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an element-wise operation with a scalar that all ranks have."""
    tensors, *rest = args
    rest = [_whole(one) if isinstance(one, Tensor) else one for one in rest]
    return op([one.to_local() if isinstance(one, DTensor) else one for one in tensors], *rest, **kwargs)
