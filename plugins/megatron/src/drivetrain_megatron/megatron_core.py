"""Supports scripts that construct Megatron-Core's ``GPTModel`` and also run under other backends. Light."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["whole_models"]


def whole_models(device: torch.device | str) -> None:
    """Let Megatron-Core construct and run unsharded models in this process. Call it after ``Accelerator()``.

    Megatron-Core needs process groups to construct a model. Under ``megatron.engine: megatron_core`` they exist once
    there is an ``Accelerator``, and this function does nothing. Under any other backend it forms groups of size 1;
    without CUDA it replaces ``torch.cuda``, and if torch has no default process group it creates one of size 1. Groups
    that the script formed itself stay. May be called twice; not collective.

    Args:
        device: where models will run, ``accelerator.device``.

    Raises:
        BackendBlockedError: Megatron-Core is not installed, or in an untested release.
    """
    from drivetrain_megatron.core_engine import parallel_state

    parallel_state.check_installed("drivetrain_megatron.megatron_core")
    parallel_state.whole_models(str(device))
