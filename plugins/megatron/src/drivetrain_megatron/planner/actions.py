"""Action lists of a pipeline: the computations of each rank in order, checked for completeness. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward; full backward; backward for the stage's input only; the backward for its weights that remains."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation: a kind, a stage, a micro-batch; ``str`` gives torch's short form, ``"2F0"``."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class ActionLists:
    """The computations of one step, rank by rank in the order in which each rank runs them.

    Communication is not listed: a rank that needs what another computed waits for it.

    Args:
        ranks: one sequence of actions for each rank of the pipeline.

    Raises:
        ValueError: a stage on two ranks, an action twice, or a micro-batch that does not go forward and backward once
            through every stage.
    """

    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        seen: dict[tuple[int, int], list[str]] = {}
        for action in self.all():
            seen.setdefault((action.stage, action.micro_batch), []).append(action.kind)
        for (stage, micro_batch), kinds in seen.items():
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                raise ValueError(f"stage {stage} runs {' '.join(kinds)} for micro-batch {micro_batch}")
        if len(seen) != self.num_stages * self.num_micro_batches:
            raise ValueError(
                f"{self.num_stages} stages and {self.num_micro_batches} micro-batches need "
                f"{self.num_stages * self.num_micro_batches} forwards, there are {len(seen)}"
            )
        for stage in range(self.num_stages):
            if sum(any(action.stage == stage for action in actions) for actions in self.ranks) != 1:
                raise ValueError(f"stage {stage} is on more than one rank")

    def all(self) -> Iterable[Action]:
        """Return every action, rank after rank."""
        return (action for actions in self.ranks for action in actions)

    @cached_property
    def num_stages(self) -> int:
        """Stages of the whole pipeline; more than ranks when a rank holds several."""
        return 1 + max(action.stage for action in self.all())

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step."""
        return 1 + max(action.micro_batch for action in self.all())

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """Return, for each stage, the rank that holds it."""
        found = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(found[stage] for stage in range(self.num_stages))

    def chunk(self, stage: int) -> int:
        """Return the place of a stage among those of its rank: 0 for the one that comes first in the pipeline."""
        return sum(self.owner[other] == self.owner[stage] for other in range(stage))


def parse(ranks: Sequence[Sequence[str]]) -> ActionLists:
    """Read actions in torch's short form, ``[["0F0", "0B0"], ...]``."""

    def one(text: str) -> Action:
        for kind in ("F", "B", "I", "W"):
            stage, found, micro_batch = text.partition(kind)
            if found:
                return Action(kind, int(stage), int(micro_batch))
        raise ValueError(f"{text!r} is no action; one looks like 2F0: stage 2, forward, micro-batch 0")

    return ActionLists(tuple(tuple(one(text) for text in actions) for actions in ranks))
