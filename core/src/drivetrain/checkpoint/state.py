"""Objects of a run that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.backend import PortableState, TensorSpec


class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict(state)``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Portable(Protocol):
    """What a checkpoint asks of a :class:`~drivetrain.api.Trainable`, and of an average of one."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    def portable_state(self) -> PortableState: ...

    def portable_template(self, saved: Mapping[str, TensorSpec], /) -> PortableState: ...

    def load_portable_state(self, state: PortableState, /) -> None: ...


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
        trainables: the prepared models with their optimizers, in the same order on every rank and in every run; after
            them the averages of models.
        averages: how many of ``trainables`` are averages.
        objects: scheduler, loaders, the user's own, by a name that does not change; the same on every rank.
        counters: numbers of the run (optimizer steps, ...); a load replaces its values in place.
        rng: random state, kept per data-parallel coordinate; ``None`` keeps none.
        remember: for objects by name, where loading ``state_dict()`` again would not be enough: returns a function that
            takes the object back to what it is now.
    """

    trainables: Sequence[Portable] = ()
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    rng: Rng | None = None
    remember: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)
    averages: int = 0
