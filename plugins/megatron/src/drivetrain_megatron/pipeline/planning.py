"""How inputs go through a model that is cut into stages: found without values, once for each signature of inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain.api import TorchEngine, UsageError, get_registry
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.cutting import Cut, balanced, cut_at
from drivetrain_megatron.pipeline.passage import Passage, Survey, stubs_of, whole_output
from drivetrain_megatron.pipeline.reductions import Counting, Reduction
from drivetrain_megatron.pipeline.running import EVERYTHING, Interception, StageRun
from drivetrain_megatron.pipeline.skeleton import Skeleton
from drivetrain_megatron.pipeline.timeline import Timeline, record
from drivetrain_megatron.pipeline.values import signature

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A model's positional and keyword arguments."""

_MOST_PASSAGES = 256
"""Signatures that are remembered; a script whose every batch has its own shape must not fill the memory."""


@final
class Planner:
    """Knows where a model is cut, and what crosses the cuts.

    Args:
        module: the user's module, whole, before anything of it is shared out: shapes in the plan are those that the
            user's forward sees.
        engine: precision.
        section: the configuration.
        num_stages: how many stages.
        device: of this rank.
    """

    def __init__(
        self, module: nn.Module, engine: TorchEngine, section: MegatronConfig, num_stages: int, device: torch.device
    ) -> None:
        self._module, self._engine, self._section, self._device = module, engine, section, device
        self.num_stages = num_stages
        self.skeleton = Skeleton(module, device)
        self.cut: Cut | None = None
        self._passages: dict[Any, Passage] = {}
        self._counts: dict[int, list[Reduction | Tensor]] = {}
        self.interception = Interception(module)
        self._bare = Interception(self.skeleton.module)

    def passage(self, arguments: Arguments) -> Passage:
        """The way of these inputs through the model. The first call decides where it is cut. Not collective."""
        told = (signature(arguments), torch.is_grad_enabled(), self._module.training)
        found = self._passages.get(told)
        if found is None:
            timeline = self._trace(arguments)
            if self.cut is None:
                points, whose = self._points(timeline)
                self.cut = cut_at(self.skeleton.module, timeline, points, whose)
                logger.info("%s is cut at %s (%s).", type(self._module).__name__, ", ".join(points), whose)
            if len(self._passages) >= _MOST_PASSAGES:
                self._passages.clear()
                self._counts.clear()
            found = self._passages[told] = self._passage(timeline, arguments, self.cut.points)
        return found

    def _passage(self, timeline: Timeline, arguments: Arguments, points: Sequence[str]) -> Passage:
        stubs = stubs_of(timeline, points)
        for interception in (self.interception, self._bare):
            interception.install([*points, *stubs])
        survey = Survey(points, stubs)
        args, kwargs = arguments
        with self.without_randomness():
            output = self._engine.forward(
                lambda: self._bare.run(survey, lambda: self.skeleton.module(*args, **kwargs)), (), {}
            )
        return Passage(survey.crossings(output), stubs, whole_output(self.skeleton, timeline))

    def counts(self, arguments: Arguments, way: Passage) -> list[Reduction | Tensor]:
        """What the losses that the model computes by itself count over a whole batch. Not collective.

        Labels are real, so they can be counted without the outputs; where only shapes count, once is enough.
        """
        found = self._counts.get(id(way))
        if found is None:
            args, kwargs = arguments
            counting = Counting()
            run = StageRun(EVERYTHING, way)
            with self.without_randomness(), counting, torch.no_grad():
                self._bare.run(run, lambda: self._engine.forward(self.skeleton.module, args, kwargs))
            found = counting.found
            if all(isinstance(one, Reduction) and one.kind != "counted" for one in found):
                self._counts[id(way)] = found
        return found

    def _trace(self, arguments: Arguments) -> Timeline:
        for ours, theirs in zip(self._module.modules(), self.skeleton.module.modules(), strict=True):
            theirs.training = ours.training
        args, kwargs = arguments
        with self.without_randomness():
            return record(self.skeleton, lambda forward: self._engine.forward(forward, (), {}), *args, **kwargs)

    def without_randomness(self) -> Any:
        """A context in which drawing random numbers leaves no trace."""
        devices = [] if self._device.type == "cpu" else [self._device]
        kind = self._device.type if devices else "cuda"
        return torch.random.fork_rng(devices=devices, device_type=kind)

    def _points(self, timeline: Timeline) -> tuple[Sequence[str], str]:
        """Where stages begin, and who says so: the user, a plugin, the model, or the balance."""
        wanted = self.num_stages - 1
        named: Sequence[str] | None = self._section.split_points
        whose = "megatron.split_points"
        if not named:
            named, whose = get_registry().pipeline_split(self._module, self.num_stages), "a plugin"
        if not named:
            return balanced(self.skeleton.module, timeline, self.num_stages), "balance of bytes"
        if len(named) != wanted:
            raise UsageError(
                f"{whose} names {len(named)} module(s), {self.num_stages} stages need {wanted}",
                cure=f"Name {wanted}: where the second and each further stage begins.",
            )
        return named, whose

    def release(self) -> None:
        """Give the module back as it was. May be called twice."""
        self.interception.remove()
