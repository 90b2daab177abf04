"""Applies the precision policy of ``mixed_precision`` to parameters, forward and outputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.backend import PrecisionPolicy
from drivetrain.distributed.trees import recursively_apply
from drivetrain.errors import UsageError
from drivetrain.wording import did_you_mean

logger = logging.getLogger(__name__)

_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


def policy_for(
    mixed_precision: str,
    *,
    output: str = "float32",
    scaler: Mapping[str, Any] | None = None,
    autocast_cache: bool | None = None,
) -> PrecisionPolicy:
    """The policy of a value of ``mixed_precision`` (table in :class:`PrecisionPolicy`).

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        output: ``"float32"`` casts floating outputs of the compute dtype; ``"compute"`` leaves them, which saves the
            float32 copy of large logits.
        scaler: arguments of ``torch.amp.GradScaler``.
        autocast_cache: ``cache_enabled`` of autocast.
    """
    if mixed_precision == "no":
        return PrecisionPolicy()
    if mixed_precision not in _COMPUTE:
        raise UsageError(
            f"mixed_precision must be 'no', 'bf16' or 'fp16', not {mixed_precision!r}",
            cure="fp8 needs an engine of its own; use bf16 here."
            if mixed_precision == "fp8"
            else did_you_mean(str(mixed_precision), ("no", *_COMPUTE)),
        )
    scaler = dict(scaler or {})
    return PrecisionPolicy(
        name="bf16" if mixed_precision == "bf16" else "fp16",
        parameters="float32",
        compute=_COMPUTE[mixed_precision],
        reduce="float32",
        output=None if output == "compute" else output,
        loss_scaling=mixed_precision == "fp16" and bool(scaler.pop("enabled", True)),
        scaler={name: value for name, value in scaler.items() if name != "enabled"},
        autocast_cache=autocast_cache,
    )


def dtype_of(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bfloat16"``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def autocast(policy: PrecisionPolicy, device: str, enabled: bool = True) -> AbstractContextManager[Any]:
    """The policy's compute context on a device; nothing when the policy computes in the parameters' dtype."""
    if policy.compute is None:
        return nullcontext()
    return torch.autocast(
        torch.device(device).type,
        dtype=dtype_of(policy.compute),
        enabled=enabled,
        cache_enabled=policy.autocast_cache,
    )


def cast_parameters(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Cast parameters that require gradients to the policy's parameter dtype, in place, keeping their identity.

    Frozen parameters and buffers keep their dtype: nothing accumulates in them, and a frozen low-precision base model
    would double in size.
    """
    if policy.parameters is None:
        return
    target = dtype_of(policy.parameters)
    changed = 0
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype.itemsize < target.itemsize:
            parameter.data = parameter.data.to(target)
            changed += 1
    if changed:
        logger.warning(
            "mixed_precision=%s keeps %s master parameters: %d parameters of lower precision were cast up. "
            "Use mixed_precision='no' to train in the model's own dtype.",
            policy.name,
            policy.parameters,
            changed,
        )


def cast_output(output: Any, policy: PrecisionPolicy) -> Any:
    """Cast tensors of the compute dtype to the output dtype, through containers and model outputs."""
    if policy.output is None or policy.compute is None:
        return output
    compute, target = dtype_of(policy.compute), dtype_of(policy.output)
    return recursively_apply(
        lambda tensor: tensor.to(target),
        output,
        test_type=lambda value: isinstance(value, Tensor) and value.dtype == compute,
    )


# ---- casting in scripts ---------------------------------------------------------------------------------------------


def convert_to_fp32(tensor: Any) -> Any:
    """A tree whose float16 and bfloat16 tensors are float32; all else is kept as it is.

    Args:
        tensor: a tensor, or a list, tuple, mapping or dataclass of them.
    """
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its outputs go through :func:`convert_to_fp32`. Picklable when the function is."""
    return functools.wraps(model_forward)(functools.partial(_call, model_forward))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return convert_to_fp32(function(*args, **kwargs))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
