"""Simulates a schedule: start and end of each action, idle time and memory of each rank. No torch.

The model: a rank runs its actions in their order, one at a time. A forward waits for the forward of the stage before, a
backward for the backward of the stage after; between ranks the result arrives ``transfer`` later. Between two actions
of a rank lies ``gap`` at least; sends cost the sender nothing else. Time is counted from the first forward to the end
of the last action of any rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain_megatron.planner.actions import Action, ActionLists
from drivetrain_megatron.planner.costs import Costs


@dataclass(frozen=True, slots=True)
class Bar:
    """One action on a rank, from ``start`` to ``end``; ``chunk`` counts the rank's stages from 0."""

    rank: int
    action: Action
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Args:
        bars: for each rank its actions in order.
        peak_bytes: for each rank the most memory it needs at once: what is resident and the activations it holds.
        peak_activations: for each rank the most forwards whose activations it holds at once, over all its stages.
    """

    bars: tuple[tuple[Bar, ...], ...]
    peak_bytes: tuple[float, ...]
    peak_activations: tuple[int, ...]

    @property
    def duration(self) -> float:
        """Time of the whole step."""
        return max(bar.end for bars in self.bars for bar in bars)

    @property
    def busy(self) -> tuple[float, ...]:
        """Return for each rank the time in which it computes."""
        return tuple(sum(bar.end - bar.start for bar in bars) for bars in self.bars)

    @property
    def idle(self) -> tuple[float, ...]:
        """Return for each rank the share of the step in which it waits, 0 to 1."""
        return tuple(1 - busy / self.duration for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks wait, averaged over ranks, 0 to 1."""
        return sum(self.idle) / len(self.idle)


def simulate(lists: ActionLists, costs: Costs) -> Timeline:
    """Run the lists.

    Raises:
        ValueError: the lists deadlock; the message names where each rank waits.
    """
    assert costs.num_stages == lists.num_stages, (costs.num_stages, lists.num_stages)
    owner = lists.owner
    chunks = [lists.chunk(stage) for stage in range(lists.num_stages)]
    ends: dict[tuple[str, int, int], float] = {}
    waiting: dict[tuple[str, int, int], list[int]] = {}
    bars: list[list[Bar]] = [[] for _ in lists.ranks]
    ready = list(range(len(lists.ranks)))
    while ready:
        rank = ready.pop()
        while len(bars[rank]) < len(lists.ranks[rank]):
            action = lists.ranks[rank][len(bars[rank])]
            missing = [key for key in _needs(action, lists.num_stages) if key not in ends]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            free = bars[rank][-1].end + costs.gap if bars[rank] else 0.0
            arrivals = [
                ends[key] + (costs.transfer if owner[key[1]] != rank else 0.0)
                for key in _needs(action, lists.num_stages)
            ]
            start = max([free, *arrivals])
            bar = Bar(rank, action, start, start + _duration(action, costs), chunks[action.stage])
            bars[rank].append(bar)
            key = (_result(action), action.stage, action.micro_batch)
            ends[key] = bar.end
            ready.extend(waiting.pop(key, ()))
    stuck = {rank: lists.ranks[rank][len(done)] for rank, done in enumerate(bars) if len(done) < len(lists.ranks[rank])}
    if stuck:
        waits = ", ".join(f"rank {rank} at {action}" for rank, action in stuck.items())
        raise ValueError(f"the ranks wait for each other for ever: {waits}")
    most = [peaks(actions, costs) for actions in lists.ranks]
    return Timeline(
        tuple(tuple(each) for each in bars), tuple(size for size, _ in most), tuple(count for _, count in most)
    )


def _result(action: Action) -> str:
    """Return the key of an action's result; both kinds of backward that give the input's gradient have the same."""
    return {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}[action.kind]


def _needs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    """Return what must have ended before this action starts."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [("forward", stage - 1, micro_batch)] if stage else []
    if action.kind == "W":
        return [("backward", stage, micro_batch)]
    after = [("backward", stage + 1, micro_batch)] if stage + 1 < num_stages else []
    return [("forward", stage, micro_batch), *after]


def _duration(action: Action, costs: Costs) -> float:
    stage = action.stage
    if action.kind == "F":
        return costs.forward[stage]
    if action.kind == "I":
        return costs.backward_input[stage] * costs.split
    if action.kind == "W":
        return costs.backward_weight[stage] * costs.split
    return costs.backward_input[stage] + costs.backward_weight[stage]


def peaks(actions: tuple[Action, ...], costs: Costs) -> tuple[float, int]:
    """Return the most bytes, and the most forwards, that a rank holds; the order of its actions decides, not time."""
    held = sum(costs.resident[stage] for stage in {action.stage for action in actions})
    most, count, most_count = held, 0, 0
    for action in actions:
        size = costs.activations[action.stage]
        if action.kind == "F":
            held, count = held + size, count + 1
        elif action.kind == "B":
            held, count = held - size, count - 1
        elif action.kind == "I":
            held -= size * (1 - costs.kept_for_weights)
        else:
            held, count = held - size * costs.kept_for_weights, count - 1
        most, most_count = max(most, held), max(most_count, count)
    return most, most_count
