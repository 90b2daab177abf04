"""Catalogue of schedules: stages per rank, valid micro-batch counts, theoretical bubble. No torch."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drivetrain.api import UsageError


@dataclass(frozen=True)
class Schedule:
    """Properties of a schedule.

    Args:
        name: as in the configuration.
        torch_name: as ``torch.distributed.pipelining.schedules.get_schedule_class`` knows it.
        stages_per_rank: 1 or 2 where the schedule fixes it, else ``None``.
        placement: ``"loop"`` puts stage s on rank s mod p; ``"v"`` goes down the ranks and up again.
        splits_backward: the backward for the weights is put off to fill the bubble.
        rule: which micro-batch counts it takes, in words, with p ranks and v stages a rank.
        takes: the same, as ``takes(num_ranks, stages_per_rank, num_micro_batches)``.
    """

    name: str
    torch_name: str
    stages_per_rank: int | None
    placement: Literal["loop", "v"]
    splits_backward: bool
    rule: str
    takes: Callable[[int, int, int], bool]


def _any(_: int, __: int, num_micro_batches: int) -> bool:
    return num_micro_batches >= 1


def _one_a_stage(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> bool:
    return num_micro_batches >= num_ranks * stages_per_rank


def _rounds(num_ranks: int, _: int, num_micro_batches: int) -> bool:
    """Micro-batches go in rounds of at least as many as there are ranks, all of one size."""
    return num_micro_batches >= num_ranks and num_micro_batches % (num_micro_batches // num_ranks) == 0


_ROUNDS = "at least p, and a multiple of m // p"

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "GPipe", 1, "loop", False, "any number", _any),
        Schedule("1f1b", "1F1B", 1, "loop", False, "at least p", _one_a_stage),
        Schedule("interleaved_1f1b", "Interleaved1F1B", None, "loop", False, _ROUNDS, _rounds),
        Schedule("zero_bubble", "InterleavedZeroBubble", None, "loop", True, _ROUNDS, _rounds),
        Schedule("zbv", "ZBVZeroBubble", 2, "v", True, "any number", _any),
        Schedule("dualpipev", "DualPipeV", 2, "v", True, "at least 2p", _one_a_stage),
    )
}
"""Schedules by name, simpler ones first. ``tests`` compare the rules with what torch's classes accept."""


def find(name: str) -> Schedule:
    """Return a schedule by its name, in any case.

    Raises:
        UsageError: there is none of this name.
    """
    found = SCHEDULES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"there is no schedule {name!r}", cure=f"{guess}There are: {', '.join(SCHEDULES)}.")
    return found


def check(schedule: Schedule, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> None:
    """Check that a schedule supports these numbers; the error names valid ones.

    Raises:
        UsageError: ranks, stages a rank or micro-batches that this schedule does not take.
    """
    name = schedule.name
    for what, value in (("ranks", num_ranks), ("stages a rank", stages_per_rank), ("micro-batches", num_micro_batches)):
        if value < 1:
            raise UsageError(f"{value} {what} for the schedule {name!r}", cure="Use 1 or more.")
    if schedule.stages_per_rank not in (None, stages_per_rank):
        others = [each.name for each in SCHEDULES.values() if each.stages_per_rank in (None, stages_per_rank)]
        raise UsageError(
            f"{name!r} holds {schedule.stages_per_rank} stage{'s' * (schedule.stages_per_rank != 1)} a rank, "
            f"not {stages_per_rank}",
            cure=f"Use {schedule.stages_per_rank}; with {stages_per_rank}: {', '.join(others)}.",
        )
    if not schedule.takes(num_ranks, stages_per_rank, num_micro_batches):
        near = nearest(schedule, num_ranks, stages_per_rank, num_micro_batches)
        raise UsageError(
            f"{name!r} with {num_ranks} ranks, stages a rank: {stages_per_rank}, does not take {num_micro_batches} "
            f"micro-batches; it takes {schedule.rule} (p = {num_ranks})",
            cure=f"Use {' or '.join(map(str, near))} micro-batches (num_micro_batches), or the schedule gpipe.",
        )


def nearest(schedule: Schedule, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> list[int]:
    """Return the next smaller and the next larger count of micro-batches that the schedule takes, where they exist."""

    def takes(count: int) -> bool:
        return schedule.takes(num_ranks, stages_per_rank, count)

    below = [count for count in range(num_micro_batches - 1, 0, -1) if takes(count)][:1]
    # Every schedule takes each multiple of its stages, so the search ends.
    above = next(count for count in itertools.count(num_micro_batches + 1) if takes(count))
    return [*below, above]


def default_stages_per_rank(schedule: Schedule) -> int:
    """Return the stages a rank when nothing is said: what the schedule fixes, else the configuration's default."""
    return schedule.stages_per_rank or 2


def stages_per_rank_options(schedule: Schedule, most: int) -> list[int]:
    """Return the numbers of stages a rank that a search tries, up to ``most``.

    Interleaving needs two; with one it is 1F1B, which is tried under that name.
    """
    if schedule.stages_per_rank is not None:
        return [schedule.stages_per_rank] if schedule.stages_per_rank <= most else []
    return list(range(1 if schedule.splits_backward else 2, most + 1))


def classic_bubble(num_ranks: int, num_micro_batches: int) -> float:
    """Return (p-1)/(m+p-1): the share of a step that ranks wait under GPipe and 1F1B with equal stages.

    Source: T = (m+p-1)(t_f+t_b), of which a rank computes m(t_f+t_b); GPipe, arXiv 1811.06965, and arXiv 2104.04473.
    """
    return (num_ranks - 1) / (num_micro_batches + num_ranks - 1)


def theoretical_bubble(
    schedule: Schedule,
    num_ranks: int,
    stages_per_rank: int,
    num_micro_batches: int,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> float | None:
    """Return the bubble that the schedule's own paper states for equal stages, or ``None`` where none is known.

    Interleaved 1F1B: (p-1)/(vm+p-1), arXiv 2104.04473 section 2.2, for whole rounds of p. Zero bubble with one stage a
    rank is ZB-H1: ranks wait (p-1)(t_f + t_i - t_w) in a step, arXiv 2401.10241, for whole rounds of p.

    Args:
        schedule: which.
        num_ranks: p.
        stages_per_rank: v.
        num_micro_batches: m.
        times: t_f, t_i, t_w of all stages of one rank together: forward, backward for the input, for the weights.
    """
    p, v, m = num_ranks, stages_per_rank, num_micro_batches
    if schedule.name in {"gpipe", "1f1b"}:
        return classic_bubble(p, m)
    if schedule.name == "interleaved_1f1b" and m % p == 0:
        return (p - 1) / (v * m + p - 1)
    forward, backward_input, backward_weight = times
    if schedule.name == "zero_bubble" and v == 1 and m % p == 0 and forward + backward_input >= backward_weight:
        waiting = (p - 1) * (forward + backward_input - backward_weight)
        return waiting / (m * (forward + backward_input + backward_weight) + waiting)
    return None
