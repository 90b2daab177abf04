"""Plans a request: simulates one schedule, or searches for the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.api import UsageError
from drivetrain_megatron.planner.catalogue import SCHEDULES, check, default_stages_per_rank, find
from drivetrain_megatron.planner.costs import Costs
from drivetrain_megatron.planner.report import Plan
from drivetrain_megatron.planner.search import Batch, Found, Source, search
from drivetrain_megatron.planner.simulate import simulate


@dataclass(frozen=True)
class Request:
    """Input of the planner.

    Args:
        num_ranks: of the pipeline.
        num_micro_batches: of one step.
        costs: of one micro-batch: one stage, which then stands for each rank, or one for each rank, or for each stage.
        measured_at: micro-batches into which the batch was cut when the costs were measured; ``None`` = as asked for.
        samples: of one step on one pipeline, where known.
        unit: of time, for people.
    """

    num_ranks: int
    num_micro_batches: int
    costs: Costs
    measured_at: int | None = None
    samples: int | None = None
    unit: str = ""

    def batch(self) -> Batch:
        """Return the batch that every schedule trains on, with the costs of at least one stage for each rank."""
        costs = self.costs
        if self.num_ranks < 1 or self.num_micro_batches < 1:
            raise UsageError(
                f"{self.num_ranks} ranks and {self.num_micro_batches} micro-batches", cure="Use 1 or more of each."
            )
        if costs.num_stages == 1:
            costs = costs.repeated(self.num_ranks)
        if costs.num_stages % self.num_ranks:
            raise UsageError(
                f"costs of {costs.num_stages} stages cannot be laid on {self.num_ranks} ranks",
                cure=f"Give one number, {self.num_ranks}, or a multiple of {self.num_ranks}.",
            )
        return Batch(costs, self.measured_at or self.num_micro_batches, self.samples)


def plan_one(request: Request, schedule: str, stages_per_rank: int | None = None, source: Source | None = None) -> Plan:
    """Simulate one schedule.

    Args:
        request: what is to be planned.
        schedule: name.
        stages_per_rank: ``None`` = what the schedule is used with.
        source: of action lists; ``None`` = torch's classes.

    Raises:
        UsageError: the schedule does not take these numbers, or the costs do not fit them.
    """
    found = find(schedule)
    stages = stages_per_rank or default_stages_per_rank(found)
    check(found, request.num_ranks, stages, request.num_micro_batches)
    costs = request.batch().cut_into(request.num_micro_batches, request.num_ranks * stages)
    lists = (source or _torch_lists())(found.name, request.num_ranks, stages, request.num_micro_batches)
    return Plan(found.name, stages, request.num_micro_batches, costs, simulate(lists, costs), request.unit)


def plan_best(
    request: Request,
    *,
    schedules: Sequence[str] = (),
    counts: Sequence[int] | None = None,
    memory: float | None = None,
    most_stages_per_rank: int = 2,
    source: Source | None = None,
) -> tuple[Plan, Found]:
    """Search, and return the best with everything that was tried. Arguments and errors as :func:`search`."""
    batch = request.batch()
    found = search(
        batch,
        request.num_ranks,
        source or _torch_lists(),
        memory=memory,
        schedules=tuple(schedules) or tuple(SCHEDULES),
        counts=counts,
        most_stages_per_rank=most_stages_per_rank,
    )
    best = found.best
    costs = batch.cut_into(best.num_micro_batches, request.num_ranks * best.stages_per_rank)
    plan = Plan(best.schedule, best.stages_per_rank, best.num_micro_batches, costs, best.timeline, request.unit)
    return plan, found


def _torch_lists() -> Source:
    from drivetrain_megatron.planner.engine_lists import action_lists

    return action_lists
