"""``accelerator.gradient_state``: where the loop stands in its window and its loader, under Accelerate's names."""

from __future__ import annotations

from typing import Any, final

from drivetrain.data.active import ActiveLoaders
from drivetrain.loop.training import Trainer


@final
class GradientState:
    """A view, computed when asked.

    Args:
        trainer: knows the windows.
        active: knows the loaders being iterated.
    """

    def __init__(self, trainer: Trainer, active: ActiveLoaders) -> None:
        self._trainer, self._active = trainer, active

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window."""
        return self._trainer.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._trainer.steps

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._active.current is not None

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader being iterated, or ``None``."""
        current = self._active.current
        return None if current is None else current.loader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader's current batch is its last."""
        return self._active.is_last_batch()

    @property
    def remainder(self) -> int:
        """Rows that count in the current global batch when it is short, else -1."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)
