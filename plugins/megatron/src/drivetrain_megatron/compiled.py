"""Runs compiled models uncompiled, with a warning, if tensor parallelism shards their parameters.

``torch.compile`` cannot trace tensors that report the full shape and hold a shard of it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.api import UnsupportedError

logger = logging.getLogger(__name__)

_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # noqa: SLF001 (torch has no public word for it)
"""Returns the frame callback of this thread; ``None`` or ``False`` if there is none."""


def leave_uncompiled(module: nn.Module) -> None:
    """Let a module and those in it run without ``torch.compile``, which was or will be called for them."""
    for part in module.modules():
        if part._compiled_call_impl is not None:  # noqa: SLF001 (torch has no public word)
            part._compiled_call_impl = None  # noqa: SLF001
            _tell(part)
        inner = part.__dict__.get("_modules", {}).get("_orig_mod")
        if inner is not None and "dynamo_ctx" in part.__dict__:
            part.__dict__["forward"] = inner.__call__
            _tell(inner)
        if type(part).compile is nn.Module.compile:
            part.compile = partial(_tell, part)  # type: ignore[method-assign]


def refuse_compiling(module: nn.Module) -> None:
    """Raise where a module with cut parameters is called from what ``torch.compile`` was put around after ``prepare``.

    Raises:
        UnsupportedError: its forward would be traced.
    """
    callback = _callback()
    if callback is None or callback is False:
        return
    raise UnsupportedError(
        f"torch.compile was put around code that calls {type(module).__name__}, and does not see through layers that "
        "are cut over tensor-parallel ranks",
        cure="Pass torch.compile(model) to prepare, which leaves it uncompiled, or compile functions that do not call "
        "the model.",
    )


def _tell(module: nn.Module, *_: Any, **__: Any) -> None:
    logger.warning(
        "%s is not compiled: torch.compile does not see through layers that are cut over tensor-parallel ranks. It "
        "trains the same without.",
        type(module).__name__,
    )
