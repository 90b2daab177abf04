"""What the core remembers about one prepared model between two calls of the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from drivetrain.backend import Trainable
from drivetrain.runtime.windows import Window


@dataclass(eq=False, slots=True)
class Record:
    """A trainable and its place in the loop.

    Args:
        trainable: the engine's side.
        source: the object that the user gave to ``prepare``, ``torch.compile`` wrapper and all.
        index: its number in the order of ``prepare``, which is its number in a checkpoint.
        ready: the last micro-batch completed a window, so that an optimizer may step.
        held: inside ``no_sync``.
        active: it has run a forward with gradients since the last backward.
        window: the window of this model alone.
    """

    trainable: Trainable
    source: nn.Module
    index: int
    ready: bool = True
    held: bool = False
    active: bool = False
    window: Window | None = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards in here stay on this rank until a later backward outside of it."""
        before, self.held = self.held, True
        self.trainable.synchronise_gradients(False)
        try:
            yield
        finally:
            self.held = before
            self.trainable.synchronise_gradients(not before)
