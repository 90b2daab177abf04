"""Detects forwards that write to parameters: the write goes to the gathered copy and would be lost.

``nn.Embedding(max_norm=...)`` does so, and modules that clamp or normalise their weights in ``forward``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.api import UnsupportedError
from drivetrain_sharding.fully_sharded import gathered

_FORWARDS = 4
"""First forwards of each unit, with gradients and without, whose values are compared: parts of a model may be used by
turns. Of later ones those are whose number is a power of two; in all others torch's count of writes is."""

_ROW = 1024
"""Elements of a row of :func:`_fingerprint`."""

_CURE = (
    "Write to parameters after optimizer.step(), where it is kept (`with torch.no_grad(): p.clamp_(-1, 1)`), use "
    "torch.nn.utils.parametrize for a weight that is computed from another, or distributed_type: ddp."
)
_INITIALISE = (
    "A forward that initialises parameters from a batch, as for actnorm, runs before prepare: give every process the "
    f"same batch. {_CURE}"
)


def refuse_max_norm(module: nn.Module, engine: str) -> None:
    """Raise for embeddings with ``max_norm``, which may write at any step. Not collective.

    Args:
        module: to prepare.
        engine: what gathers parameters, for the message.

    Raises:
        UnsupportedError: there is one.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is an {type(part).__name__} with max_norm={part.max_norm}, which writes to its "
                f"weight in each forward; under {engine} that is a copy, gathered for this forward, and the write is "
                "lost",
                cure="Leave max_norm out and shorten the rows after optimizer.step() (`with torch.no_grad(): "
                f"w.copy_(torch.renorm(w, {part.norm_type:g}, 0, {part.max_norm}))`, with its weight as w).",
            )


def watch_forwards(module: nn.Module, groups: Iterable[Any], engine: str) -> None:
    """Make forwards raise :class:`UnsupportedError` where they write to parameters.

    Args:
        module: the model.
        groups: its parameter groups.
        engine: what gathers parameters, for the message.
    """
    for group in groups:
        _Watch(type(module).__name__, group, engine)


class _Watch:
    """Watches the forwards of one unit."""

    def __init__(self, model: str, group: Any, engine: str) -> None:
        self._model, self._group, self._engine = model, group, engine
        self._numbers = [0, 0]
        """Forwards without gradients, and with."""
        self._before: list[tuple[str, Tensor, int, Tensor | None]] = []
        group.pre_forward = partial(self._pre_forward, group.pre_forward)
        group.post_forward = partial(self._post_forward, group.post_forward)

    def _pre_forward(self, plain: Any, *args: Any) -> Any:
        found = plain(*args)
        with_gradients = torch.is_grad_enabled()
        number = self._numbers[with_gradients]
        self._numbers[with_gradients] += 1
        due = number < _FORWARDS or not number & (number - 1)
        self._before = [
            (name, one, _version(one), _fingerprint(one) if due else None)
            for name, one in gathered(self._group)
            if type(one) is nn.Parameter or isinstance(one, DTensor)
        ]
        return found

    def _post_forward(self, plain: Any, *args: Any) -> Any:
        before, self._before = self._before, []
        for name, one, version, its in before:
            if (_version(one) != version) if its is None else not torch.equal(its, _fingerprint(one)):
                raise UnsupportedError(
                    f"the forward of {self._model} writes to its parameter {name}; under {self._engine} that is a "
                    "copy, gathered for this forward, and the write is lost",
                    cure=_CURE if torch.is_grad_enabled() else _INITIALISE,
                )
        return plain(*args)


def _version(parameter: Tensor) -> int:
    """Torch's count of writes in place, but for those on ``data``; in inference mode there is none."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001


@torch.no_grad()
def _fingerprint(whole: Tensor) -> Tensor:
    """Sums of the bits along rows and along columns, which detect changed and exchanged values."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    part = whole.to_local() if isinstance(whole, DTensor) else whole.detach()
    bits = part.reshape(-1).view(kinds.get(whole.element_size(), torch.int64))
    square = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    return torch.cat([square.sum(0), square.sum(1), bits[square.numel() :].long()])
