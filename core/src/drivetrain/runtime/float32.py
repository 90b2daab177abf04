"""Outputs in float32, for scripts that cast them by themselves; a prepared model does so by its precision policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.runtime.trees import recursively_apply


def convert_to_fp32(tensor: Any) -> Any:
    """A tree whose float16 and bfloat16 tensors are float32; all else is kept as it is.

    Args:
        tensor: a tensor, or a list, tuple, mapping or dataclass of them.
    """
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it was, whose outputs go through :func:`convert_to_fp32`. It can be pickled when that one can."""
    return functools.wraps(model_forward)(functools.partial(_call, model_forward))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return convert_to_fp32(function(*args, **kwargs))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
