"""Finds persistent buffers, and keeps them unchanged while activation checkpointing reruns a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def state_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Persistent buffers, each with its module and name."""
    return [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set  # noqa: SLF001 (torch has no public word for it)
    ]


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Context that restores buffers after a repeated forward, so that statistics count a batch once."""
    before = [(part, name, buffer, buffer.clone()) for part, name, buffer in state_buffers(module)]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in before:
                setattr(part, name, buffer)
                buffer.copy_(value)
