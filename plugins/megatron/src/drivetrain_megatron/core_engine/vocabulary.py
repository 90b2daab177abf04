"""Gathers vocabulary-parallel logits, and computes losses without gathering them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor


def fits(model: GPTModel, vocabulary: int) -> bool:
    """Whether the ranks share out the columns without filling any up."""
    return bool(model.vocab_size == vocabulary)


def whole(logits: Tensor, vocabulary: int) -> Tensor:
    """Every column on every rank, without those that fill the last rank up. Collective over ``tp``.

    Args:
        logits: ``[B, S, V/tp]``.
        vocabulary: V.
    """
    found: Tensor = gather_from_tensor_model_parallel_region(logits)
    return found[..., :vocabulary]


def for_loss(logits: Tensor, vocabulary: int, *, keep: bool) -> Tensor:
    """This rank's columns in float32, such that those which fill the last rank up add nothing. Not collective.

    Args:
        logits: ``[B, S, V/tp]``.
        vocabulary: V.
        keep: logits are needed as they are; cross-entropy changes them in place.
    """
    mine = vocabulary - parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    logits = logits.to(torch.float32, copy=keep)
    if mine < logits.shape[-1]:
        filler = torch.arange(logits.shape[-1], device=logits.device) >= mine
        logits = logits.masked_fill(filler, torch.finfo(logits.dtype).min)
    return logits
