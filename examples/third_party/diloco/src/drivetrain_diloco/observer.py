"""Reports on rounds: the drift of each, and at the end how much less was sent than by reducing every step."""

from __future__ import annotations

import logging
from typing import Any

from drivetrain_diloco.backend import DiLoCoBackend

_logger = logging.getLogger("drivetrain.diloco")


def log_rounds(accelerator: Any, step: int) -> None:
    """Give rounds that have just ended to the run's trackers. Called on every worker after each optimizer step."""
    backend = accelerator.backend
    assert isinstance(backend, DiLoCoBackend)
    for end in backend.ended if accelerator.trackers else ():
        accelerator.log({"diloco/round": end.number, "diloco/drift": end.drift}, step=step)
    backend.ended.clear()


def tell_traffic(accelerator: Any) -> None:
    """Say on the main process what the rounds sent, beside what a mean of gradients in each step would have."""
    backend = accelerator.backend
    assert isinstance(backend, DiLoCoBackend)
    if not backend.num_rounds or not accelerator.is_main_process:
        return
    each = backend.sent_bytes / backend.num_rounds
    _logger.info(
        "%d rounds of %d local steps: each worker averaged %.3g MB, gradients in every step would have been %.3g MB",
        backend.num_rounds,
        backend.section.local_steps,
        backend.sent_bytes / 1e6,
        each * backend.num_rounds * backend.section.local_steps / 1e6,
    )
