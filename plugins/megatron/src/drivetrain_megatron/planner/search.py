"""Searches schedules and micro-batch counts by simulation, for the least idle time within the memory. No torch.

The idea of choosing a pipeline by simulating it from measured stage times is Varuna's (Athlur et al., EuroSys 2022,
arXiv 2111.04007); the candidates here are torch's schedules and micro-batch counts instead of machine layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drivetrain.api import UsageError
from drivetrain_megatron.planner.actions import ActionLists
from drivetrain_megatron.planner.catalogue import SCHEDULES, find, stages_per_rank_options
from drivetrain_megatron.planner.costs import Costs
from drivetrain_megatron.planner.simulate import Timeline, simulate

Source = Callable[[str, int, int, int], ActionLists]
"""``source(name, num_ranks, stages_per_rank, num_micro_batches)``: where action lists come from."""


@dataclass(frozen=True)
class Batch:
    """The batch of one step, which every candidate trains on.

    Args:
        costs: of one micro-batch when the batch is cut into ``num_micro_batches``; by stage, as many as were measured.
        num_micro_batches: at which the costs hold.
        samples: of one data-parallel rank and step, where known: micro-batches then hold whole samples, equally many.
    """

    costs: Costs
    num_micro_batches: int
    samples: int | None = None

    def counts(self) -> list[int]:
        """Return the micro-batch counts worth trying: divisors of the samples, else halvings and doublings."""
        if self.samples is not None:
            return [count for count in range(1, self.samples + 1) if self.samples % count == 0]
        return sorted({max(1, self.num_micro_batches * factor // 8) for factor in (1, 2, 4, 8, 16, 32)})

    def cut_into(self, num_micro_batches: int, num_stages: int) -> Costs:
        """Return the costs of one micro-batch when the batch is cut into so many, in a pipeline of so many stages."""
        return self.costs.for_stages(num_stages).resized(self.num_micro_batches / num_micro_batches)


@dataclass(frozen=True)
class Candidate:
    """One schedule with one micro-batch count, simulated.

    Args:
        schedule: name.
        stages_per_rank: of every rank.
        num_micro_batches: of one step.
        timeline: result of the simulation.
        rejected: why it cannot be chosen; empty when it can.
    """

    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    timeline: Timeline
    rejected: str = ""

    def order(self) -> tuple[float, int, int, float]:
        """Shorter steps first; of equal ones the simpler schedule, fewer micro-batches, less memory."""
        # Sums of the same durations in another order differ in their last digits.
        duration = float(f"{self.timeline.duration:.9g}")
        simplicity = list(SCHEDULES).index(self.schedule) * 100 + self.stages_per_rank
        return duration, simplicity, self.num_micro_batches, max(self.timeline.peak_bytes)


@dataclass(frozen=True)
class Found:
    """The outcome of a search: those that fit, best first, and those that do not, with the reason."""

    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The one to take."""
        return self.fitting[0]


def search(
    batch: Batch,
    num_ranks: int,
    source: Source,
    *,
    memory: float | None = None,
    schedules: Sequence[str] = tuple(SCHEDULES),
    counts: Iterable[int] | None = None,
    most_stages_per_rank: int = 2,
) -> Found:
    """Simulate every schedule with every micro-batch count that it takes, and sort by the time of the step.

    All candidates train on the same batch, so that without overhead the shortest step is the one with the least bubble;
    with overhead, smaller micro-batches cost time that is no bubble, and the shortest step is still what is wanted.

    Args:
        batch: what is trained on, and its costs.
        num_ranks: of the pipeline.
        source: of action lists.
        memory: bytes that a rank may use; ``None`` = no bound.
        schedules: names to try.
        counts: micro-batch counts to try; ``None`` = ``batch.counts()``.
        most_stages_per_rank: for schedules that leave it open.

    Raises:
        UsageError: no candidate fits; names the nearest.
    """
    wanted = sorted(set(batch.counts() if counts is None else counts))
    if batch.samples is not None and any(batch.samples % count for count in wanted):
        odd = [count for count in wanted if batch.samples % count]
        raise UsageError(
            f"{batch.samples} samples cannot be cut into {odd[0]} equal micro-batches",
            cure=f"Try some of {', '.join(map(str, batch.counts()))}.",
        )
    found = []
    for schedule in map(find, schedules):
        for stages_per_rank in stages_per_rank_options(schedule, most_stages_per_rank):
            num_stages = num_ranks * stages_per_rank
            for count in wanted:
                if schedule.takes(num_ranks, stages_per_rank, count):
                    lists = source(schedule.name, num_ranks, stages_per_rank, count)
                    timeline = simulate(lists, batch.cut_into(count, num_stages))
                    found.append(
                        Candidate(schedule.name, stages_per_rank, count, timeline, _too_large(timeline, memory))
                    )
    fitting = sorted((each for each in found if not each.rejected), key=Candidate.order)
    rejected = sorted((each for each in found if each.rejected), key=lambda each: max(each.timeline.peak_bytes))
    if not found:
        rules = "; ".join(f"{name}: {find(name).rule}" for name in schedules)
        raise UsageError(
            f"none of these schedules takes {', '.join(map(str, wanted))} micro-batches on {num_ranks} ranks",
            cure=f"They take: {rules} (p = {num_ranks}).",
        )
    if not fitting:
        least = rejected[0]
        raise UsageError(
            f"nothing fits: even {describe(least)} needs {gibibytes(max(least.timeline.peak_bytes))} on one rank, "
            f"allowed are {gibibytes(memory or 0)}",
            cure="Use more ranks, smaller micro-batches, or activation checkpointing.",
        )
    return Found(tuple(fitting), tuple(rejected))


_GAIN = 0.03
"""Fraction of a step's time that is not worth another schedule: simulated times are not known better."""

_MOST_ROUNDS = 8
"""Micro-batches for each rank up to which :func:`improvements` looks: 1F1B then waits for an eighth of a step."""


def improvements(
    batch: Batch,
    num_ranks: int,
    source: Source,
    *,
    seconds: float,
    memory: float,
    schedules: Sequence[str],
    counts: Sequence[int] | None = None,
    stages_per_rank: int | None = None,
) -> list[Candidate]:
    """Return what to run in place of a schedule that was simulated, the faster first.

    The best of all comes first. A model may not be cut into as many stages, and what engines keep beside activations is
    not simulated; so the best with one stage a rank follows.

    Args:
        batch: what is trained on, and its costs.
        num_ranks: of the pipeline.
        source: of action lists.
        seconds: of a step as it was simulated; infinite where it does not fit, so that any that fits is better.
        memory: bytes that a rank may use.
        schedules: names to try.
        counts: micro-batch counts to try; ``None`` = at least one for each rank, that fit the batch.
        stages_per_rank: of schedules that leave it open; ``None`` = up to two.

    Returns:
        At most two; none that is not faster by more than 3 %.
    """
    if counts is None:
        counts = [count for count in batch.counts() if num_ranks <= count <= _MOST_ROUNDS * num_ranks]
    most = max(2, stages_per_rank or 0)
    try:
        found = search(
            batch, num_ranks, source, memory=memory, schedules=schedules, counts=counts, most_stages_per_rank=most
        )
    except UsageError:  # None fits, or takes these counts.
        return []
    better = [
        each
        for each in found.fitting
        if each.timeline.duration < (1 - _GAIN) * seconds
        and (stages_per_rank in (None, each.stages_per_rank) or find(each.schedule).stages_per_rank)
    ]
    if not better:
        return []
    best, single = _simplest(better), [each for each in better if each.stages_per_rank == 1]
    return [best] if best.stages_per_rank == 1 or not single else [best, _simplest(single)]


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of those that are as fast as the first, which is the fastest."""
    fastest = candidates[0].timeline.duration
    alike = (each for each in candidates if each.timeline.duration <= (1 + _GAIN) * fastest)
    return min(alike, key=lambda each: each.order()[1:])


def describe(candidate: Candidate) -> str:
    """Return a candidate in a few words."""
    stages = f", {candidate.stages_per_rank} stages a rank" if candidate.stages_per_rank > 1 else ""
    return f"{candidate.schedule}{stages}, {candidate.num_micro_batches} micro-batches"


def gibibytes(size: float) -> str:
    """Return a size for people: at least three digits."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"


def _too_large(timeline: Timeline, memory: float | None) -> str:
    """Return why a rank's memory does not suffice, or nothing."""
    peak = max(timeline.peak_bytes)
    if memory is None or peak <= memory:
        return ""
    rank = timeline.peak_bytes.index(peak)
    return f"rank {rank} needs {gibibytes(peak)} > {gibibytes(memory)}"
