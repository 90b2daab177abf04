"""Finds out whether a script changes gradients between the micro-batches of an accumulation window.

A script that clips with ``torch.nn.utils.clip_grad_norm_`` after each backward, or edits ``p.grad`` there, changes
gradients that are a rank's own until the window closes. On one process they are those of all samples. Windows 1, 2, 4,
8, ... of a model therefore reduce gradients at each micro-batch, and look whether any was changed before the next one;
where one was, later windows reduce them too, so that what the script changes is what it would change on one process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from drivetrain.distributed.dtensors import is_dtensor

if TYPE_CHECKING:
    from drivetrain.backend import Backend
    from drivetrain.loop.model import PreparedModel
    from drivetrain.loop.window import Window

logger = logging.getLogger(__name__)


@final
class GradientEdits:
    """Watches the gradients of one window, which reduces them at each micro-batch.

    Args:
        models: of the window.
    """

    def __init__(self, models: Sequence[PreparedModel]) -> None:
        self._models = models
        self._parameters: list[Tensor] = []
        """Those that the last backward met: between a forward and its backward a model may hold gathered ones."""
        self._left: list[Any] | None = None
        self.found = False

    def before_backward(self) -> None:
        """Compare gradients with what the last backward has left. Not collective."""
        self.found = self.found or (self._left is not None and self._left != self._read())

    def after_backward(self) -> None:
        """Note what a backward has left. Not collective."""
        self._parameters = [each for model in self._models for each in model.trainable.module.parameters()]
        self._left = None if self.found else self._read()

    def skip(self) -> None:
        """Compare nothing before the next backward: one of another window has reached these models. Not collective."""
        self._left = None

    def _read(self) -> list[Any]:
        """Numbers that an edit of a parameter's gradient changes, for each parameter. Waits for the device."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (engines refuse reads by the script)
            grads = [each.grad for each in self._parameters]
        return [None if grad is None else _seen(grad) for grad in grads]


@torch.no_grad()
def _seen(grad: Tensor) -> tuple[int, str]:
    """Return the count of writes to a gradient, and the norm of the part of it that is here.

    The norm is text, since one that is no number equals itself then. Operations on lists of DTensors count as no write.
    """
    if is_dtensor(grad):
        return 0, str(float(torch.linalg.vector_norm(grad.to_local())))
    norm = str(float(torch.linalg.vector_norm(grad))) if grad.layout is torch.strided else ""
    return grad._version, norm  # noqa: SLF001


def watch(window: Window, backend: Backend) -> None:
    """Decide where a window begins whether it reduces gradients at each micro-batch and is watched.

    Where the script has hooks on gradients, on any rank, none is: engines look at these, which must not be given
    reduced gradients in some windows and a rank's own in others. Collective over data-parallel ranks in those windows
    that would be watched otherwise.
    """
    window.number += 1
    is_power_of_two = window.number & (window.number - 1) == 0
    is_apart = any(model.held or model.steps_alone for model in window.models)
    is_watched = is_power_of_two and not window.always_reduces and not is_apart
    if is_watched:
        is_watched = not _on_any_rank(any(map(_has_hooks, window.models)), backend)
    window.edits = GradientEdits(window.models) if is_watched else None
    window.sync_each_batch = is_watched or window.always_reduces


def _has_hooks(model: PreparedModel) -> bool:
    return any(True for _ in model.trainable.gradient_hooks())


def _on_any_rank(found: bool, backend: Backend) -> bool:
    return bool(backend.reduce(torch.tensor(int(found), device=backend.topology.device), "max").item())


def after_backward(window: Window, windows: Iterable[Window], backend: Backend) -> None:
    """Note what a backward has left, or end the watch. Collective over data-parallel ranks where it closes the window.

    Args:
        window: of the backward.
        windows: all, whose models it may have reached.
        backend: for the collective.
    """
    for other in windows:
        if other.edits is not None and other is not window:
            other.edits.skip()
    if window.edits is not None:
        if window.closing:
            _settle(window, backend)
        else:
            window.edits.after_backward()


def _settle(window: Window, backend: Backend) -> None:
    """Decide at the closing backward of a watched window how later ones reduce. Collective over data-parallel ranks."""
    edits, window.edits = window.edits, None
    if not _on_any_rank(edits is not None and edits.found, backend):
        return
    window.always_reduces = window.sync_each_batch = True
    if backend.topology.rank == 0:
        logger.warning(
            "The script changes gradients of %s in micro-batches before the last one of an accumulation window. From "
            "now on each micro-batch reduces them, so that what is changed are gradients of all processes' samples, as "
            "with GradientAccumulationPlugin(sync_each_batch=True). To reduce them once a window, change them under "
            "`if accelerator.sync_gradients:`, or clip with accelerator.clip_grad_norm_.",
            " and ".join(model.plain_class.__name__ for model in window.models),
        )
