"""A batch of tokens for a causal language model, and the targets and counts computed from it.

Shapes: B rows, S positions, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.core_engine.calls import OTHER_ENGINE, signature_of
from drivetrain_megatron.pipeline.batches import Rows

IGNORED = -100
"""Labels that do not count, as in Transformers."""

_USED = frozenset({"input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch", "return_dict"})
_HARMLESS = frozenset({"use_cache"})
"""Requests a cache of keys and values, which neither training nor scoring a full sequence uses."""


@dataclass(frozen=True)
class Tokens:
    """One batch, or a part of it.

    Args:
        input_ids: int64 ``[B, S]``.
        attention_mask: ``[B, S]``, 0 where a position is padding; ``None``: nowhere.
        position_ids: ``[B, S]`` or ``[1, S]``; ``None``: counted from 0.
        labels: int64 ``[B, S]``; ``None``: the model computes no loss.
        num_items: what the loss is divided by; ``None``: the labels that count.
        as_tuple: the output shall be a tuple.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    num_items: Tensor | float | None = None
    as_tuple: bool = False

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, positions: bool) -> Tokens:
        """Read the arguments of the model's forward.

        Args:
            module: the user's model, whose forward has names for positional arguments.
            args: of a call.
            kwargs: of a call.
            positions: the model looks positions up; a rotary embedding counts them from 0 by itself.

        Raises:
            UnsupportedError: an argument that Megatron-Core's model does not have.
            UsageError: no tokens, or a shape that is none of the above.
        """
        given = _given(module, args, kwargs)
        unknown = sorted(given.keys() - _USED - _HARMLESS)
        if unknown:
            raise UnsupportedError(
                f"{type(module).__name__} was called with {', '.join(unknown)}, which megatron.engine: megatron_core "
                "does not have",
                cure=f"Leave it out. {OTHER_ENGINE}",
            )
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise UsageError(
                f"{type(module).__name__} was called without input_ids of two dims",
                cure="Pass input_ids=[rows, positions].",
            )
        for name in ("attention_mask", "labels"):
            one = given.get(name)
            if one is not None and one.shape != ids.shape:
                raise UsageError(
                    f"{name} has the shape {tuple(one.shape)}, input_ids {tuple(ids.shape)}",
                    cure=f"Under megatron.engine: megatron_core both are [rows, positions]. {OTHER_ENGINE}",
                )
        place = given.get("position_ids")
        if place is not None and not positions:
            if not bool((place == torch.arange(ids.shape[1], device=place.device)).all()):
                raise UnsupportedError(
                    "position_ids do not count from 0, and Megatron-Core's rotary embedding does",
                    cure=f"Leave position_ids out. {OTHER_ENGINE}",
                )
            place = None
        as_tuple = given.get("return_dict") is False
        return cls(
            ids, given.get("attention_mask"), place, given.get("labels"), given.get("num_items_in_batch"), as_tuple
        )

    @property
    def form(self) -> Hashable:
        """Key on which the output's containers and shapes depend."""
        return self.input_ids.shape, self.labels is not None, self.as_tuple

    @cached_property
    def counted(self) -> Tensor | float:
        """Divisor of a sum of losses over the batch."""
        assert self.labels is not None, "a loss needs labels"
        if self.num_items is not None:
            return self.num_items
        return (self.labels[:, 1:] != IGNORED).sum()

    @cached_property
    def targets(self) -> Tensor:
        """Return for each position the label of the next one, int64 ``[B, S]``; the last position has none."""
        assert self.labels is not None, "a loss needs labels"
        return nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED)

    @property
    def positions(self) -> Tensor:
        """int64 ``[B, S]``."""
        if self.position_ids is not None:
            return self.position_ids.expand_as(self.input_ids)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)

    @property
    def masked(self) -> Tensor | None:
        """Bool ``[B, 1, S, S]``, true where a query does not look; ``None`` where that is the future only."""
        if self.attention_mask is None:
            return None
        length = self.input_ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=self.input_ids.device).triu(1)
        return future | (self.attention_mask == 0)[:, None, None, :]

    def part(self, rows: Rows, index: int) -> Tokens:
        """Return one micro-batch, with the loss divisor of the full batch."""

        def cut(one: Tensor | None) -> Tensor | None:
            return one if one is None or one.shape[0] != rows.size else rows.part(one, index)

        counted = None if self.labels is None else self.counted
        return Tokens(
            rows.part(self.input_ids, index),
            cut(self.attention_mask),
            cut(self.position_ids),
            cut(self.labels),
            counted,
        )


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    bound = signature_of(type(module).forward).bind(module, *args, **kwargs).arguments
    bound |= bound.pop("kwargs", {})
    bound.pop("self", None)
    # 0 is the default of logits_to_keep: all of them.
    return {
        name: value
        for name, value in bound.items()
        if value is not None and not (_is_off(value) and name != "return_dict")
    }


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, int) and value == 0)
