"""For scripts that construct a ``GPTModel`` of Megatron-Core and also run under other backends. Light."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["whole_models"]


def whole_models(device: torch.device | str) -> None:
    """Let Megatron-Core construct and run whole models in this process. To be called after ``Accelerator()``.

    Megatron-Core asks for groups of ranks wherever a model is constructed. Under ``megatron.engine: megatron_core`` it
    finds some once there is an ``Accelerator``, and nothing happens here. Under any other backend it gets groups in
    which this process is alone; without CUDA it is given answers for ``torch.cuda``, and where torch has no process
    group yet it gets one of this process. Groups that the script formed itself stay. May be called twice; not
    collective.

    Args:
        device: where models will run, ``accelerator.device``.

    Raises:
        BackendBlockedError: Megatron-Core is not installed, or in a release that was never tried.
    """
    from drivetrain_megatron.core_engine import parallel_state

    parallel_state.check_installed("drivetrain_megatron.megatron_core")
    parallel_state.whole_models(str(device))
