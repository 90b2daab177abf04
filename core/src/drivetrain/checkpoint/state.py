"""What belongs to a run and goes into its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from drivetrain.backend import Trainable


class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict(state)``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class Rng:
    """This process's random state.

    Args:
        capture: gives a tree (see :mod:`drivetrain.checkpoint.tree`) of this process's generators.
        restore: takes such a tree.
        reseed: seeds all generators from one number, for a process that the checkpoint knows nothing of.
    """

    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    reseed: Callable[[int], None]


@dataclass
class TrainingState:
    """A run's state.

    Args:
        trainables: the prepared models with their optimizers, in the same order on every rank and in every run.
        objects: scheduler, loaders, the user's own, by a name that does not change; the same on every rank.
        counters: numbers of the run (optimizer steps, ...); a load replaces its values in place.
        rng: random state, kept per data-parallel coordinate; ``None`` keeps none.
    """

    trainables: Sequence[Trainable] = ()
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    rng: Rng | None = None
