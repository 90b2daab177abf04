"""Measures a real step: the timeline of each rank, and the costs of the stages derived from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from drivetrain_megatron.planner.actions import Action, ActionLists, Kind
from drivetrain_megatron.planner.costs import Costs, costs
from drivetrain_megatron.planner.simulate import Bar, Timeline, peaks

Moments = list[tuple[Action, float, float]]
"""Actions of one rank in the order in which they ran, with start and end on a clock that all ranks share."""


@dataclass
class Recorder:
    """Notes when the stages of this rank compute.

    Args:
        synchronise: called before each look at the clock, where a device computes behind the host's back
            (``torch.accelerator.synchronize``); waiting for it takes away what a device would overlap.
    """

    synchronise: Callable[[], None] | None = None
    moments: Moments = field(default_factory=list)

    @contextmanager
    def of(self, stages: Sequence[Any]) -> Iterator[Moments]:
        """Record the calls of ``torch.distributed.pipelining`` stages inside of the block. Local, one rank.

        The clock is the machine's monotonic one: ranks of one machine may be compared, those of several may not.
        """
        for stage in stages:
            self._note(stage, "forward_one_chunk", lambda _: "F")
            self._note(stage, "backward_one_chunk", lambda options: "B" if options.get("full_backward", True) else "I")
            self._note(stage, "backward_weight_one_chunk", lambda _: "W")
        try:
            yield self.moments
        finally:
            for stage in stages:
                for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                    delattr(stage, name)

    def _note(self, stage: Any, name: str, kind: Callable[[dict[str, Any]], Kind]) -> None:
        """Put a method of the instance's own before the one of its class."""
        run = getattr(stage, name)

        def noting(micro_batch: int, *args: Any, **options: Any) -> Any:
            start = self._now()
            outcome = run(micro_batch, *args, **options)
            self.moments.append((Action(kind(options), stage.stage_index, micro_batch), start, self._now()))
            return outcome

        setattr(stage, name, noting)

    def _now(self) -> float:
        if self.synchronise is not None:
            self.synchronise()
        return time.monotonic()


def last_step(moments: Moments) -> Moments:
    """Return the last of several steps, noted one after the other: a new one begins where an action returns."""
    begin: int = 0
    seen: set[Action] = set()
    for index, (action, _, _) in enumerate(moments):
        if action in seen:
            begin, seen = index, set()
        seen.add(action)
    return moments[begin:]


def timeline(ranks: Sequence[Moments]) -> tuple[ActionLists, Timeline]:
    """Return one measured step of all ranks as the lists that ran and a timeline that begins at 0.

    What is not computation is idle here: waiting, and the time that messages and the schedule itself take.
    """
    lists = ActionLists(tuple(tuple(action for action, _, _ in moments) for moments in ranks))
    begin = min(start for moments in ranks for _, start, _ in moments)
    bars = tuple(
        tuple(
            Bar(rank, action, start - begin, end - begin, lists.chunk(action.stage)) for action, start, end in moments
        )
        for rank, moments in enumerate(ranks)
    )
    none = costs([1.0] * lists.num_stages)
    counts = tuple(peaks(actions, none)[1] for actions in lists.ranks)
    return lists, Timeline(bars, (0.0,) * len(ranks), counts)


def costs_of(lists: ActionLists, found: Timeline) -> Costs:
    """Return the costs that explain a measured step: means by stage and kind, and the time between ranks.

    A backward that ran in one piece is split in halves; one that ran in parts is not. The gap is the mean time between
    an action that waits for no other rank and the one before it; the transfer is the mean time from the end of a
    computation to the start of one on another rank that had been waiting for it. Both are exact for a simulated step;
    in a real one they hold whatever lies between, such as the schedule's own Python. What is lost is that times vary: a
    rank waits for the slowest of several, which costs more than the mean.
    """
    by_stage: dict[tuple[Kind, int], list[float]] = {}
    for bar in (bar for bars in found.bars for bar in bars):
        by_stage.setdefault((bar.action.kind, bar.action.stage), []).append(bar.end - bar.start)
    durations = {key: fmean(values) for key, values in by_stage.items()}

    def part(kind: Kind, stage: int) -> float:
        if (kind, stage) in durations:
            return durations[kind, stage]
        return durations["B", stage] / 2

    stages = range(lists.num_stages)
    gap, transfer = _delays(lists, found)
    return Costs(
        tuple(durations["F", stage] for stage in stages),
        tuple(part("I", stage) for stage in stages),
        tuple(part("W", stage) for stage in stages),
        (0.0,) * lists.num_stages,
        (0.0,) * lists.num_stages,
        transfer=transfer,
        gap=gap,
    )


def _delays(lists: ActionLists, found: Timeline) -> tuple[float, float]:
    """Return gap and transfer; 0 for what no action shows."""
    ends = {
        ("F" if bar.action.kind == "F" else "B", bar.action.stage, bar.action.micro_batch): bar.end
        for bars in found.bars
        for bar in bars
        if bar.action.kind != "W"
    }

    def sent(bar: Bar) -> float | None:
        """Return when another rank had computed what this action needs; ``None`` if it needs no message."""
        kind, stage, micro_batch = bar.action.kind, bar.action.stage, bar.action.micro_batch
        peer = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= peer < lists.num_stages or lists.owner[peer] == bar.rank:
            return None
        return ends["F" if kind == "F" else "B", peer, micro_batch]

    pairs = [pair for bars in found.bars for pair in pairwise(bars)]
    gaps = [bar.start - before.end for before, bar in pairs if sent(bar) is None]
    gap = max(fmean(gaps), 0.0) if gaps else 0.0
    waits = [(bar.start, sent(bar), before.end + gap) for before, bar in pairs]
    waits += [(bars[0].start, sent(bars[0]), 0.0) for bars in found.bars]
    transfers = [start - end for start, end, free in waits if end is not None and end > free]
    return gap, max(fmean(transfers), 0.0) if transfers else 0.0
