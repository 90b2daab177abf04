"""Idle time of real pipelines against its prediction: torch's schedules over gloo, and the same lists simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.pairs import Samples
from drivetrain_megatron.planner.actions import ActionLists
from drivetrain_megatron.planner.catalogue import classic_bubble, default_stages_per_rank, find
from drivetrain_megatron.planner.engine_lists import action_lists, stages_of
from drivetrain_megatron.planner.measured import Recorder, costs_of, timeline
from drivetrain_megatron.planner.simulate import Timeline, simulate

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
        trained: by the backend megatron, through an unchanged loop; else by torch's schedule and stages alone.
    """

    schedule: str
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    unit: float = 0.04
    num_micro_batches: int = 8
    trained: bool = False

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.weights)

    @property
    def title(self) -> str:
        """For the table."""
        uneven = "" if len(set(self.weights)) == 1 else f", times {':'.join(f'{each:g}' for each in self.weights)}"
        by = "drivetrain's megatron" if self.trained else "torch alone"
        return f"{self.schedule} by {by}, {self.world} ranks, {self.num_micro_batches} micro-batches{uneven}"


class _Wait(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
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


class Blocks(nn.Module):
    """A model of blocks that wait, to be cut between them."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Waiting, seconds))

    def forward(self, value: Tensor) -> Tensor:
        """One block after the other."""
        for block in self.blocks:
            value = block(value)
        return value


def measure(case: PipelineCase, steps: int) -> tuple[dict[str, Samples], list[str]]:
    """Idle seconds of a rank in a step: measured, simulated from the costs of the step before, and in theory.

    Collective over all ranks of the job; every rank returns the same.
    """
    expected = action_lists(case.schedule, case.world, _per_rank(case), case.num_micro_batches)
    seen = []
    # The first step makes buffers and connections; its costs predict nothing.
    for lists, real in (_trained if case.trained else _bare)(case, steps + 2):
        assert lists == expected, "what ran is not what was simulated"
        seen.append(real)
    found = {name: Samples([], []) for name in (MEASURED, SIMULATED, THEORY)}
    theory, bubbles = classic_bubble(case.world, case.num_micro_batches), []
    for before, real in pairwise(seen[1:]):
        predicted = simulate(expected, costs_of(expected, before))
        bubbles.append((real.bubble, predicted.bubble))
        found[MEASURED].wall.append(real.bubble * real.duration)
        found[SIMULATED].wall.append(predicted.bubble * predicted.duration)
        found[THEORY].wall.append(theory * real.duration)
    measured, simulated = (median(values) for values in zip(*bubbles, strict=True))
    return found, [f"bubble: measured {measured:.1%}, simulated {simulated:.1%}, theory {theory:.1%}"]


def _bare(case: PipelineCase, steps: int) -> Iterator[tuple[ActionLists, Timeline]]:
    """Steps of torch's schedule over torch's stages."""
    with ExitStack() as undo:
        dist.init_process_group("gloo")
        undo.callback(dist.destroy_process_group)
        rank, world = dist.get_rank(), dist.get_world_size()
        schedule, per_rank = find(case.schedule), _per_rank(case)
        stages = [
            PipelineStage(Waiting(seconds), index, world * per_rank, torch.device("cpu"))
            for index, seconds in enumerate(_seconds(case))
            if index in stages_of(schedule.placement, world, per_rank, rank)
        ]
        kind: Any = schedules.get_schedule_class(schedule.torch_name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        built = kind(stages[0] if single else stages, case.num_micro_batches, loss_fn=_loss)
        batch = torch.ones(case.num_micro_batches, WIDTH)
        inputs = [batch] if any(stage.is_first for stage in stages) else []
        target = {"target": batch} if any(stage.is_last for stage in stages) else {}
        for _ in range(steps):
            dist.barrier()
            with Recorder().of(stages) as moments:
                built.step(*inputs, **target)
            ranks: list[Any] = [None] * world
            dist.all_gather_object(ranks, list(moments))
            yield timeline(ranks)


def _trained(case: PipelineCase, steps: int) -> Iterator[tuple[ActionLists, Timeline]]:
    """Steps of the loop that users write, by the backend megatron."""
    from drivetrain import Accelerator, load_config
    from drivetrain_megatron.planner.training import measure as measured_pipeline

    seconds = _seconds(case)
    section = {
        "pipeline_parallel_size": case.world,
        "num_micro_batches": case.num_micro_batches,
        "schedule": case.schedule,
        "split_points": [f"blocks.{index}" for index in range(1, len(seconds))],
    }
    overrides = {"distributed_type": "megatron", "use_cpu": True, "megatron": section}
    accelerator = Accelerator(config=load_config(overrides=overrides, environ={}))
    model: Any = Blocks(seconds)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(_loss(model(torch.ones(case.num_micro_batches, WIDTH)), 1.0))
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(steps):
        accelerator.wait_for_everyone()
        with measured_pipeline(model) as measured:
            step()
        assert measured.lists is not None
        assert measured.timeline is not None
        yield measured.lists, measured.timeline
    accelerator.end_training()


def _per_rank(case: PipelineCase) -> int:
    return default_stages_per_rank(find(case.schedule))


def _seconds(case: PipelineCase) -> list[float]:
    """Of each stage; a rank's time is cut evenly over its stages, whichever these are."""
    per_rank = _per_rank(case)
    num_stages = case.world * per_rank
    return [case.unit * case.weights[index * case.world // num_stages] / per_rank for index in range(num_stages)]


def _loss(output: Tensor, target: Tensor | float) -> Tensor:
    return (output - target).square().mean()
