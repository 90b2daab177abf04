"""Gathers partitioned layers while ``load_state_dict`` fills them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import zero
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_sharding import refuse_assignment


def load_in_parts(module: nn.Module) -> None:
    """Let each layer gather its own parameters while ``load_state_dict`` fills it. The calls become collective.

    Rank 0's values count, as those of ``prepare`` do.
    """
    for layer in module.modules():
        if any(hasattr(each, "ds_id") for each in layer._parameters.values()):  # noqa: SLF001
            layer._load_from_state_dict = _gathering(layer, layer._load_from_state_dict)  # type: ignore[method-assign]  # noqa: SLF001


def _gathering(layer: nn.Module, theirs: Callable[..., None]) -> Callable[..., None]:
    def load(state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        refuse_assignment(metadata, "ZeRO stage 3 shares out over ranks")
        parts = [each for each in layer._parameters.values() if hasattr(each, "ds_id")]  # noqa: SLF001
        with zero.GatheredParameters(parts, modifier_rank=0):
            theirs(state, prefix, metadata, *rest)
        # Small parameters stay gathered between uses.
        small: list[Any] = [each for each in parts if each.ds_persist]  # type: ignore[union-attr]
        if small:
            small[0].all_gather(param_list=small)

    return load


def refuse_hidden_outputs(module: nn.Module) -> list[Any]:
    """Raise where a layer returns tensors in which DeepSpeed finds none: it would not gather for its backward.

    DeepSpeed looks into tuples, lists and dictionaries. A model that has its parameters in layers may return any type.

    Returns:
        Handles of hooks.
    """
    return [
        layer.register_forward_hook(_check_output)
        for layer in module.modules()
        if any(hasattr(each, "ds_id") for each in layer._parameters.values())  # noqa: SLF001
    ]


def _check_output(layer: nn.Module, _: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not _open(output):
        raise UnsupportedError(
            f"the layer {type(layer).__name__} has parameters and returns {type(output).__name__}, in which DeepSpeed "
            "does not find the tensors before which ZeRO stage 3 gathers parameters in backward",
            cure="Return a tensor, or tuples, lists or dictionaries of tensors, or use zero_stage 0, 1 or 2.",
        )


def _open(value: Any) -> bool:
    """Whether DeepSpeed sees all tensors in this."""
    if isinstance(value, tuple | list):
        return all(map(_open, value))
    if isinstance(value, dict):
        return all(map(_open, value.values()))
    return value is None or isinstance(value, Tensor | int | float | complex | str | bytes)


def plain_loads(module: nn.Module) -> None:
    """Take that back."""
    for layer in module.modules():
        layer.__dict__.pop("_load_from_state_dict", None)
