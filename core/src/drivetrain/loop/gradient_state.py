"""Implements ``accelerator.gradient_state``: where the loop stands in its window and its loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from drivetrain.distributed.current import newest_accelerator

if TYPE_CHECKING:
    from drivetrain.data.active import ActiveLoaders
    from drivetrain.loop.accumulation import TrainingLoop


@final
class GradientState:
    """Position of the loop in its window and its loader: ``accelerator.gradient_state``, computed on access.

    ``GradientState()`` is that of the newest accelerator.

    Args:
        loop: knows the windows.
        active: knows the loaders being iterated.

    Raises:
        UsageError: without arguments, and there is no accelerator.
    """

    _loop: TrainingLoop
    _active: ActiveLoaders

    def __new__(cls, loop: TrainingLoop | None = None, active: ActiveLoaders | None = None) -> GradientState:
        """Return the newest accelerator's, or make one for an accelerator."""
        if loop is None or active is None:
            found: GradientState = newest_accelerator().gradient_state
            return found
        self = super().__new__(cls)
        self._loop, self._active = loop, active
        return self

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: the state is computed from the accelerator's loop."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes a window."""
        return self._loop.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._loop.steps

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
