"""Reports a plan or a search as text and as JSON. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain_megatron.planner.catalogue import classic_bubble, find, theoretical_bubble
from drivetrain_megatron.planner.costs import Costs
from drivetrain_megatron.planner.search import Candidate, Found, gibibytes
from drivetrain_megatron.planner.simulate import Timeline

SHOWN = 5
"""Candidates of a search that are listed beside the best."""

WASTEFUL = 0.2
"""A bubble above this is remarked upon; nnScaler refuses such plans (``max_pipeline_bubble_ratio``)."""


@dataclass(frozen=True)
class Plan:
    """One simulated schedule with everything that a report says of it.

    Args:
        schedule: name.
        stages_per_rank: of every rank.
        num_micro_batches: of one step.
        costs: by stage of this schedule.
        timeline: result of the simulation.
        unit: of time, for people.
    """

    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    costs: Costs
    timeline: Timeline
    unit: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.timeline.bars)

    @property
    def classic(self) -> float:
        """(p-1)/(m+p-1)."""
        return classic_bubble(self.num_ranks, self.num_micro_batches)

    @property
    def theory(self) -> float | None:
        """Bubble according to the schedule's paper, for equal stages and no transfer; ``None`` if unknown."""
        costs, p = self.costs, self.num_ranks
        schedule = find(self.schedule)
        factor = costs.split if schedule.splits_backward else 1.0
        backward = (sum(costs.backward_input) * factor / p, sum(costs.backward_weight) * factor / p)
        times = (sum(costs.forward) / p, *backward)
        return theoretical_bubble(schedule, p, self.stages_per_rank, self.num_micro_batches, times)

    def section(self) -> dict[str, Any]:
        """Return the keys of the section ``megatron:`` that make a run of this plan."""
        keys = {
            "pipeline_parallel_size": self.num_ranks,
            "schedule": self.schedule,
            "num_micro_batches": self.num_micro_batches,
        }
        return keys if find(self.schedule).stages_per_rank else keys | {"stages_per_rank": self.stages_per_rank}

    def title(self) -> str:
        """Return one line: what is drawn and how much of it is bubble."""
        stages = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        theory = "theory" if self.schedule in {"gpipe", "1f1b"} else "1f1b would have, in theory,"
        return (
            f"{self.schedule}: {self.num_ranks} ranks{stages}, {self.num_micro_batches} micro-batches, "
            f"bubble {self.timeline.bubble:.1%} ({theory} (p-1)/(m+p-1): {self.classic:.1%})"
        )

    def lines(self) -> list[str]:
        """Return what is said below the drawing."""
        timeline = self.timeline
        unit = f" {self.unit}" if self.unit else ""
        lines = [f"step {timeline.duration:.6g}{unit}, bubble {timeline.bubble:.1%} of the step, simulated"]
        lines.append(f"theory (p-1)/(m+p-1): {self.classic:.1%}, GPipe and 1F1B with equal stages")
        if self.theory is not None and abs(self.theory - self.classic) > 1e-12:
            lines.append(f"theory of {self.schedule} with equal stages: {self.theory:.1%}")
        for rank, idle in enumerate(timeline.idle):
            memory = f", peak {gibibytes(timeline.peak_bytes[rank])}" if any(timeline.peak_bytes) else ""
            held = timeline.peak_activations[rank]
            lines.append(
                f"rank {rank}: idle {idle:.1%}, holds activations of at most {held} forward{'s' * (held != 1)}{memory}"
            )
        if timeline.bubble > WASTEFUL:
            lines.append(f"More than {WASTEFUL:.0%} of the step is bubble: more micro-batches, or let --search look.")
        return lines

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        timeline = self.timeline
        return {
            "schedule": self.schedule,
            "num_ranks": self.num_ranks,
            "stages_per_rank": self.stages_per_rank,
            "num_micro_batches": self.num_micro_batches,
            "unit": self.unit,
            "duration": timeline.duration,
            "bubble": timeline.bubble,
            "theoretical_bubble": self.classic,
            "theoretical_bubble_of_schedule": self.theory,
            "ranks": [
                {
                    "rank": rank,
                    "idle": timeline.idle[rank],
                    "busy": timeline.busy[rank],
                    "peak_bytes": timeline.peak_bytes[rank],
                    "peak_activations": timeline.peak_activations[rank],
                    "actions": [
                        {
                            "kind": bar.action.kind,
                            "stage": bar.action.stage,
                            "micro_batch": bar.action.micro_batch,
                            "start": bar.start,
                            "end": bar.end,
                        }
                        for bar in bars
                    ],
                }
                for rank, bars in enumerate(timeline.bars)
            ],
        }


def search_lines(found: Found, unit: str) -> list[str]:
    """Return the candidates of a search as lines: the best, the next ones, and those that do not fit and why."""
    lines = [f"Tried {len(found.fitting) + len(found.rejected)}, {len(found.fitting)} fit. Shortest steps first:"]
    lines.append(f"  {'schedule':<17} {'stages':>6} {'micro-batches':>13} {'step':>10} {'bubble':>7} {'peak':>9}")
    shown = found.fitting[: SHOWN + 1]
    lines += [("* " if each is found.best else "  ") + _row(each, unit) for each in shown]
    if found.rejected:
        # The shortest of those that do not fit are what more memory would buy.
        nearest = sorted(found.rejected, key=Candidate.order)[:SHOWN]
        lines.append("Do not fit:")
        lines += [f"  {_row(each, unit)}  {each.rejected}" for each in nearest]
    return lines


def search_data(found: Found) -> list[dict[str, Any]]:
    """Return every candidate of a search as JSON data; the first is the chosen one."""
    return [
        {
            "schedule": each.schedule,
            "stages_per_rank": each.stages_per_rank,
            "num_micro_batches": each.num_micro_batches,
            "duration": each.timeline.duration,
            "bubble": each.timeline.bubble,
            "peak_bytes": max(each.timeline.peak_bytes),
            "rejected": each.rejected,
        }
        for each in (*found.fitting, *found.rejected)
    ]


def _row(candidate: Candidate, unit: str) -> str:
    timeline = candidate.timeline
    peak = gibibytes(max(timeline.peak_bytes)) if any(timeline.peak_bytes) else "-"
    return (
        f"{candidate.schedule:<17} {candidate.stages_per_rank:>6} {candidate.num_micro_batches:>13} "
        f"{f'{timeline.duration:.5g} {unit}'.strip():>10} {timeline.bubble:>7.1%} {peak:>9}"
    )
