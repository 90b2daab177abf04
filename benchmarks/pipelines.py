"""Idle time of real pipelines against its prediction: torch's schedules over gloo, and the same lists simulated."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Samples

MEASURED, SIMULATED, THEORY = "measured", "drivetrain plan, from the step before", "theory (p-1)/(m+p-1)"
WIDTH = 8
"""Of what stages that wait hand on: messages as small as they get."""


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline.

    Args:
        schedule: by drivetrain's name.
        weights: how long the stages take, relative to each other; one for each rank.
        unit: seconds of a stage's forward, and of each half of its backward.
        num_micro_batches: of one step.
    """

    schedule: str
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    unit: float = 0.04
    num_micro_batches: int = 8

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.weights)

    @property
    def title(self) -> str:
        """For the table."""
        uneven = "" if len(set(self.weights)) == 1 else f", times {':'.join(f'{each:g}' for each in self.weights)}"
        return f"{self.schedule}, {self.world} ranks, {self.num_micro_batches} micro-batches{uneven}"


class _Wait(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Waiting(nn.Module):
    """A stage that sleeps where another computes: four ranks on two cores then do not wait for a core as well.

    Args:
        seconds: of its forward, of its backward for the input, and of its backward for the weights.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """``value`` and the weight, each through a slow backward of its own."""
        time.sleep(self.seconds)
        passed: Tensor = _Wait.apply(value, self.seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = _Wait.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return passed + weight


def measure(case: PipelineCase, steps: int) -> tuple[dict[str, Samples], list[str]]:
    """Idle seconds of a rank in a step: measured, simulated from the costs of the step before, and in theory.

    Collective over all ranks of the job; every rank returns the same.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    from drivetrain_megatron.planner.catalogue import classic_bubble, default_stages_per_rank, find
    from drivetrain_megatron.planner.engine_lists import action_lists, stages_of
    from drivetrain_megatron.planner.measured import Recorder, costs_of, timeline
    from drivetrain_megatron.planner.simulate import simulate

    with ExitStack() as undo:
        dist.init_process_group("gloo")
        undo.callback(dist.destroy_process_group)
        rank, world = dist.get_rank(), dist.get_world_size()
        schedule = find(case.schedule)
        per_rank = default_stages_per_rank(schedule)
        expected = action_lists(schedule.name, world, per_rank, case.num_micro_batches)
        stages = [
            _stage(case, index, world * per_rank, per_rank)
            for index in stages_of(schedule.placement, world, per_rank, rank)
        ]
        kind: Any = schedules.get_schedule_class(schedule.torch_name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        built = kind(stages[0] if single else stages, case.num_micro_batches, loss_fn=_loss)
        seen = []
        for _ in range(steps + 2):
            dist.barrier()
            with Recorder().of(stages) as moments:
                _run(built, stages, case)
            ranks: list[Any] = [None] * world
            dist.all_gather_object(ranks, list(moments))
            lists, real = timeline(ranks)
            assert lists == expected, "what ran is not what was simulated"
            seen.append(real)
    found = {name: Samples([], []) for name in (MEASURED, SIMULATED, THEORY)}
    theory, bubbles = classic_bubble(world, case.num_micro_batches), []
    # The first step makes buffers and connections; its costs predict nothing.
    for before, real in pairwise(seen[1:]):
        predicted = simulate(expected, costs_of(expected, before))
        bubbles.append((real.bubble, predicted.bubble))
        found[MEASURED].wall.append(real.bubble * real.duration)
        found[SIMULATED].wall.append(predicted.bubble * predicted.duration)
        found[THEORY].wall.append(theory * real.duration)
    measured, simulated = (median(values) for values in zip(*bubbles, strict=True))
    return found, [f"bubble: measured {measured:.1%}, simulated {simulated:.1%}, theory {theory:.1%}"]


def _stage(case: PipelineCase, index: int, num_stages: int, per_rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage

    # A rank's time is cut evenly over its stages, whichever these are.
    seconds = case.unit * case.weights[index * case.world // num_stages] / per_rank
    return PipelineStage(Waiting(seconds), index, num_stages, torch.device("cpu"))


def _run(built: Any, stages: list[Any], case: PipelineCase) -> None:
    """One step, on the same data every time."""
    batch = torch.ones(case.num_micro_batches, WIDTH)
    inputs = [batch] if any(stage.is_first for stage in stages) else []
    target = {"target": batch} if any(stage.is_last for stage in stages) else {}
    built.step(*inputs, **target)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
