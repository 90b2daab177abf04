"""Call signature of Megatron-Core's ``GPTModel``: returns losses of all positions, or logits.

Shapes: B rows, S positions, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.core_engine import vocabulary
from drivetrain_megatron.core_engine.calls import signature_of
from drivetrain_megatron.pipeline.batches import Rows

_USED = frozenset({"input_ids", "position_ids", "attention_mask", "labels"})
_HARMLESS = frozenset({"loss_mask", "runtime_gather_output"})
"""The first is for predictions of several tokens, which are refused; logits are always whole, as the second asks."""


@dataclass(frozen=True)
class GPTBatch:
    """One batch, or a part of it.

    Args:
        input_ids: int64 ``[B, S]``.
        positions: int64 ``[B, S]``.
        masked: bool ``[B, 1, S, S]`` or ``[1, 1, S, S]``, true where a query does not look; ``None``: the future only.
        labels: int64 ``[B, S]``, the token that follows each position; ``None``: logits are wanted.
    """

    input_ids: Tensor
    positions: Tensor
    masked: Tensor | None = None
    labels: Tensor | None = None

    @property
    def form(self) -> Hashable:
        """Key on which the output's shape depends."""
        return self.input_ids.shape, self.labels is not None

    def part(self, rows: Rows, index: int) -> GPTBatch:
        """One micro-batch."""

        def cut(one: Tensor | None) -> Tensor | None:
            return one if one is None or one.shape[0] != rows.size else rows.part(one, index)

        return GPTBatch(
            rows.part(self.input_ids, index), rows.part(self.positions, index), cut(self.masked), cut(self.labels)
        )


@final
class GPTCalls:
    """See :class:`drivetrain_megatron.core_engine.calls.Calls`.

    Args:
        module: the user's model.
        rows: of its vocabulary.
        looked_up: positions have an embedding of their own.
    """

    def __init__(self, module: nn.Module, rows: int, *, looked_up: bool) -> None:
        self._module, self._rows, self._looked_up = module, rows, looked_up

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GPTBatch:
        """One batch."""
        bound = signature_of(type(self._module).forward).bind(self._module, *args, **kwargs).arguments
        bound.pop("self")
        given = {name: value for name, value in bound.items() if value is not None}
        unknown = sorted(given.keys() - _USED - _HARMLESS)
        if unknown:
            raise UnsupportedError(
                f"GPTModel was called with {', '.join(unknown)}, which is not offered under Drivetrain",
                cure="Call it with input_ids, position_ids, attention_mask and labels.",
            )
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise UsageError("GPTModel was called without input_ids of two dims", cure="Pass [rows, positions].")
        places = given.get("position_ids")
        if places is None and self._looked_up:
            raise UsageError("GPTModel was called without position_ids", cure="Pass int64 [rows, positions].")
        if places is None:
            places = torch.arange(ids.shape[1], device=ids.device)
        _check_shape("labels", given.get("labels"), tuple(ids.shape))
        mask, length = given.get("attention_mask"), ids.shape[1]
        _check_shape("attention_mask", mask, (len(ids), 1, length, length), (1, 1, length, length))
        _check_shape("position_ids", places, (len(ids), length), (1, length), (length,))
        return GPTBatch(ids, places.expand_as(ids), mask, given.get("labels"))

    def absent(self, batch: GPTBatch, device: torch.device) -> Tensor:
        """Losses of all positions where there are labels, else logits."""
        shape = batch.input_ids.shape
        return torch.empty(shape if batch.labels is not None else (*shape, self._rows), device=device)

    def labels(self, model: Any, batch: GPTBatch, absent: Tensor, wanted: set[int]) -> Tensor | None:
        """Return the labels of the script."""
        return batch.labels if vocabulary.fits(model, self._rows) else None

    def outputs(
        self,
        model: Any,
        computed: Tensor,
        batch: GPTBatch,
        absent: Tensor,
        num_parts: int,
        wanted: set[int],
    ) -> Tensor:
        """Losses ``[B, S]`` by the model's own method, or logits ``[B, S, V]``."""
        if 0 not in wanted:
            return absent
        if batch.labels is None:
            return vocabulary.whole(computed, self._rows).to(absent.dtype)
        if computed.dim() == 2:
            return computed
        columns = vocabulary.for_loss(computed, self._rows, keep=False)
        losses: Tensor = model.compute_language_model_loss(batch.labels, columns.transpose(0, 1).contiguous())
        return losses


def _check_shape(name: str, given: Tensor | None, *fitting: tuple[int, ...]) -> None:
    if given is not None and tuple(given.shape) not in fitting:
        raise UsageError(
            f"{name} has the shape {tuple(given.shape)}, and input_ids {fitting[0][:1] + fitting[0][-1:]}",
            cure=f"Megatron-Core wants {' or '.join(map(str, fitting))}.",
        )
