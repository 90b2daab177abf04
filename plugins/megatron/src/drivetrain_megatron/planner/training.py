"""Measure the pipeline of a run that trains: its timeline, and the file of costs that ``drivetrain plan`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.api import UsageError
from drivetrain_megatron.pipeline.pipeline import Pipeline
from drivetrain_megatron.pipelined import PipelinedTrainable
from drivetrain_megatron.planner.actions import ActionLists
from drivetrain_megatron.planner.measured import Moments, Recorder, costs_of, last_step, timeline
from drivetrain_megatron.planner.simulate import Timeline


@dataclass
class Measured:
    """The last step of a pipeline that ran while :func:`measure` watched; empty until its block is left.

    Args:
        lists: what each rank ran.
        timeline: when.
    """

    lists: ActionLists | None = None
    timeline: Timeline | None = None

    def write_costs(self, path: str | Path) -> None:
        """Write the costs of the stages, in seconds, for ``drivetrain plan schedule --costs``. Not collective."""
        assert self.lists is not None, "measure() fills this when its block is left"
        assert self.timeline is not None
        found = costs_of(self.lists, self.timeline)
        whole = [first + second for first, second in zip(found.backward_input, found.backward_weight, strict=True)]
        values: dict[str, Any] = {"forward": found.forward, "backward": whole}
        if any(action.kind == "I" for action in self.lists.all()):
            values |= {"backward_input": found.backward_input, "backward_weight": found.backward_weight}
        values |= {"transfer": found.transfer, "gap": found.gap, "unit": "s"}
        values["num_micro_batches"] = self.lists.num_micro_batches
        Path(path).write_text(json.dumps(values, indent=1), encoding="utf-8")


def _pipeline(model: Any) -> Pipeline:
    try:
        trainable = model._drivetrain.trainable  # noqa: SLF001 (what the core keeps on a prepared model)
    except AttributeError:  # Not prepared at all.
        trainable = None
    if isinstance(trainable, PipelinedTrainable):
        return trainable.pipeline
    raise UsageError(
        f"this {type(model).__name__} is not trained by a pipeline",
        cure="Pass what prepare returned with megatron.pipeline_parallel_size of 2 or more.",
    )


@contextmanager
def measure(model: Any) -> Iterator[Measured]:
    """Watch the pipeline of a prepared model while it trains. Collective over the pipeline's ranks, at its end.

    The device is waited for at each beginning and end of a stage's computation, so that a measured step is slower than
    others; time spent in these waits is the stage's. All ranks must be on one machine, since their clocks are compared.

    Args:
        model: what ``prepare`` returned under the backend ``megatron`` with a pipeline; it has trained for a step.

    Raises:
        UsageError: no pipeline, or one that has not trained yet.
    """
    pipeline = _pipeline(model)
    if not pipeline.stages:
        raise UsageError(
            "the model has not been cut yet", cure="Train for a step first: the first forward shows where to cut."
        )
    cpu = all(stage.device.type == "cpu" for stage in pipeline.stages)
    measured = Measured()
    with Recorder(None if cpu else torch.accelerator.synchronize).of(pipeline.stages) as moments:
        yield measured
    ranks: list[Moments] = [[] for _ in range(dist.get_world_size(pipeline.group))]
    dist.all_gather_object(ranks, last_step(moments), group=pipeline.group)
    if not all(ranks):
        raise UsageError("no step was trained while the pipeline was measured", cure="Put one into the block.")
    measured.lists, measured.timeline = timeline(ranks)
