"""What the core remembers about one prepared model between two calls of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import nn

from drivetrain.backend import Trainable
from drivetrain.runtime.buffers import Buffers
from drivetrain.runtime.windows import Window


@dataclass(eq=False, slots=True, weakref_slot=True)
class Record:
    """A trainable and its place in the loop.

    Args:
        trainable: the engine's side.
        source: the object that the user gave to ``prepare``, ``torch.compile`` wrapper and all.
        index: its number in the order of ``prepare``, which is its number in a checkpoint.
        ready: the last micro-batch completed a window, so that an optimizer may step.
        held: inside ``no_sync``.
        steps_alone: inside ``LocalSGD``: optimizers step on gradients of this rank.
        active: it has run a forward with gradients since the last backward.
        window: the window of this model alone.
        plain_class: the class of ``source`` before it was prepared.
        inside: identifiers of the threads in which the engine's forward runs.
        buffers: keeps them the same on all ranks; ``None`` where the engine does.
        replicated: the backend's capability of that name.
        inner: what ``model.module`` is; ``None`` where the user's class has such an attribute of its own.
    """

    trainable: Trainable
    source: nn.Module
    index: int
    ready: bool = True
    held: bool = False
    steps_alone: bool = False
    active: bool = False
    window: Window | None = None
    plain_class: type[nn.Module] = nn.Module
    inside: set[int] = field(default_factory=set)
    buffers: Buffers | None = None
    replicated: bool = True
    inner: nn.Module | None = None

    @property
    def run(self) -> Callable[..., Any]:
        """What a call of the prepared model runs."""
        return self.trainable.forward

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here the engine calls the model in this thread: the user's own forward with its hooks."""
        thread = get_ident()
        if thread in self.inside:
            yield
            return
        self.inside.add(thread)
        try:
            yield
        finally:
            self.inside.discard(thread)

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
