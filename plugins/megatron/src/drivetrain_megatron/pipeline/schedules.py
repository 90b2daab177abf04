"""Builds torch's schedule for a run from stages and the number of micro-batches, by the rules of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from drivetrain_megatron import private_names
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.transport import Stage
from drivetrain_megatron.planner.catalogue import Schedule, check, find
from drivetrain_megatron.planner.engine_lists import construct


def stages_per_rank(section: MegatronConfig) -> int:
    """Number of stages per rank."""
    return find(section.schedule).stages_per_rank or section.stages_per_rank


def rank_of_stage(section: MegatronConfig, stage: int, num_ranks: int) -> int:
    """Return the pipeline rank of a stage: round-robin (looped placement), or back and forth (V placement)."""
    if find(section.schedule).placement == "v" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def wanted_parts(section: MegatronConfig, num_ranks: int) -> int:
    """Micro-batches of a full batch.

    Raises:
        UsageError: the schedule does not take that many.
    """
    if section.num_micro_batches == 1:
        # The batch in one piece, for models that mix its samples: any schedule can do that.
        return 1
    stages = stages_per_rank(section)
    parts = section.num_micro_batches or num_ranks * stages
    check(find(section.schedule), num_ranks, stages, parts)
    return parts


def parts_for(section: MegatronConfig, rows: int, num_ranks: int) -> int:
    """Micro-batches of a batch of so many rows: as wanted, or fewer where there are too few rows."""
    takes, stages = find(section.schedule).takes, stages_per_rank(section)
    most = max(min(wanted_parts(section, num_ranks), rows), 1)
    return next((parts for parts in range(most, 0, -1) if takes(num_ranks, stages, parts)), most)


def make(section: MegatronConfig, stages: Sequence[Stage], parts: int, loss: Callable[..., Any]) -> Any:
    """Torch's schedule for so many micro-batches; where they are too few for the one that is named, a plainer one."""
    schedule = find(section.schedule)
    fits = schedule.takes(stages[0].group_size, stages_per_rank(section), parts)
    kind = get_schedule_class(schedule.torch_name) if fits else _plainer(schedule)
    made = construct(kind, stages, parts, loss)
    private_names.check(made)
    # No setup: the shapes are known, and connections are made at first use.
    for flag in private_names.flags(made):
        setattr(made, flag, True)
    return made


def run(made: Any, parts: int) -> None:
    """Run a schedule once. Collective over the pipeline.

    Args:
        made: by :func:`make`.
        parts: how many micro-batches.
    """
    step = made._step_microbatches  # noqa: SLF001 (step would cut the batch once more)
    # Older releases of torch, 2.9 among them, always keep the outputs of the last stage: losses, one number each.
    keeps = {"return_outputs": False} if "return_outputs" in signature(step).parameters else {}
    step([()] * parts, [{"index": index} for index in range(parts)], list(range(parts)), **keeps)


def _plainer(schedule: Schedule) -> Any:
    """One with the same placement of stages, for any number of micro-batches."""
    if schedule.stages_per_rank == 1:
        return ScheduleGPipe
    return ScheduleZBVZeroBubble if schedule.placement == "v" else ScheduleLoopedBFS
