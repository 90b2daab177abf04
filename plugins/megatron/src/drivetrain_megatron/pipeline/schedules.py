"""Schedules by name: torch's classes, where their stages are, and how many micro-batches they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from drivetrain.api import UsageError
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.transport import Stage

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, type[PipelineScheduleMulti]] = {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}


def stages_per_rank(section: MegatronConfig) -> int:
    """How many stages a rank has."""
    if section.schedule in SINGLE:
        return 1
    return 2 if section.schedule in V_SHAPED else section.stages_per_rank


def rank_of_stage(section: MegatronConfig, stage: int, num_ranks: int) -> int:
    """Which rank of the pipeline computes a stage: around and around, or there and back again."""
    if section.schedule in V_SHAPED and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def wanted_parts(section: MegatronConfig, num_ranks: int) -> int:
    """Micro-batches of a full batch.

    Raises:
        UsageError: the schedule does not take that many.
    """
    num_stages = num_ranks * stages_per_rank(section)
    parts = section.num_micro_batches or num_stages
    if not _fits(section.schedule, parts, num_ranks, num_stages):
        near = next(
            (
                able
                for able in range(parts, parts + 4 * num_stages)
                if _fits(section.schedule, able, num_ranks, num_stages)
            ),
            num_stages,
        )
        raise UsageError(
            f"megatron.num_micro_batches: the schedule {section.schedule} over {num_ranks} ranks with {num_stages} "
            f"stages does not take {parts}",
            cure=f"Write {near}, or schedule: gpipe, which takes any number.",
        )
    return parts


def parts_for(section: MegatronConfig, rows: int, num_ranks: int) -> int:
    """Micro-batches of a batch of so many rows: as wanted, or fewer where there are too few rows."""
    num_stages = num_ranks * stages_per_rank(section)
    most = max(min(wanted_parts(section, num_ranks), rows), 1)
    return next((one for one in range(most, 0, -1) if _fits(section.schedule, one, num_ranks, num_stages)), most)


def _fits(schedule: str, parts: int, num_ranks: int, num_stages: int) -> bool:
    if schedule in {"1f1b", "dualpipev"}:
        return parts >= num_stages
    if schedule in LOOPED:
        return parts >= num_ranks and parts % max(1, parts // num_ranks) == 0
    return True


def make(section: MegatronConfig, stages: Sequence[Stage], parts: int, loss: Callable[..., Any]) -> Any:
    """Torch's schedule for so many micro-batches; where they are too few for the one that is named, a plainer one."""
    stage, num_ranks = stages[0], stages[0].group_size
    fits = _fits(section.schedule, parts, num_ranks, stage.num_stages)
    if section.schedule in SINGLE:
        single = (SINGLE[section.schedule] if fits else ScheduleGPipe)(stage, parts, loss_fn=loss, scale_grads=False)
        # There is nothing to set up: stages know their shapes, and connections are made when they are first used.
        single._stage_forward_initialized = single._stage_backward_initialized = True  # noqa: SLF001
        return single
    if section.schedule in V_SHAPED:
        kind = V_SHAPED[section.schedule] if fits else ScheduleZBVZeroBubble
    else:
        kind = LOOPED[section.schedule] if fits else ScheduleLoopedBFS
    several = kind(list(stages), parts, loss_fn=loss, scale_grads=False)
    several._stages_forward_initialized = several._stages_backward_initialized = True  # noqa: SLF001
    return several
