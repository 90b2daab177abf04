"""Refuses ``q.data = x`` where ``x`` is one of an engine's tensors in parts, or the engine owns the memory of ``q``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain.api import UnsupportedError, UsageError

_IN_PARTS: list[type] = []

_MEMORY = "_drivetrain_memory"
"""Attribute of a parameter whose memory an engine owns: its description for an error."""


def refuse_as_data(kind: type) -> None:
    """Refuse tensors of this class as the data of ordinary parameters. Once in a process.

    torch asks the parameter for its ``__torch_function__``, and not the value. An ordinary one that is given a DTensor
    has no memory: the process ends by a segmentation fault where its elements are read.

    Args:
        kind: subclass of DTensor.
    """
    theirs: Any = torch.Tensor.data

    def give(parameter: Any, values: Any) -> None:
        if hasattr(parameter, _MEMORY):
            raise UnsupportedError(
                f"param.data = ... gives {getattr(parameter, _MEMORY)} other memory, which the engine does not see: "
                "the write is lost",
                cure="Write `with torch.no_grad(): param.copy_(value)`, after optimizer.step().",
            )
        if isinstance(values, tuple(_IN_PARTS)):
            raise UsageError(
                "q.data = x would give an ordinary parameter the memory of a tensor in parts on several ranks",
                cure="Write `with torch.no_grad(): q.copy_(x)`, on every rank.",
            )
        theirs.__set__(parameter, values)

    if not _IN_PARTS:
        nn.Parameter.data = property(theirs.__get__, give)  # type: ignore[assignment]
    if kind not in _IN_PARTS:
        _IN_PARTS.append(kind)


def keep_memory(parameter: nn.Parameter, what: str) -> None:
    """Refuse other memory for a parameter, once :func:`refuse_as_data` was called. Not collective.

    Args:
        parameter: whole, for a time.
        what: it is, as part of a sentence.
    """
    setattr(parameter, _MEMORY, what)
