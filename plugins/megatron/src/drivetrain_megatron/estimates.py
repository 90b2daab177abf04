"""Estimates memory and communication of a rank under ``megatron``, for a planner, by traces on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.api import DrivetrainError
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.layout_estimates import Degrees, PlannedModel, TensorEstimate, refused
from drivetrain_megatron.pipeline_estimates import PipelineEstimate
from drivetrain_planner import Estimate, PlanRequest


def estimates(request: PlanRequest) -> list[Estimate]:
    """Layers shared over ``tp``, depth over ``pp``, both, each with replicas over the ranks that are left."""
    section = MegatronConfig.model_validate(request.sections.get("megatron", {}))
    if request.world_size == 1:
        return [refused("megatron", "megatron", "it shares out layers over processes, and there is one")]
    if section.engine != "torch":
        return [refused("megatron", "megatron", f"engine: {section.engine} is not modelled; plan with engine: torch")]
    made = PlannedModel(request, section)
    return [_estimate(made, degrees) for degrees in _degrees(request, section)]


def _degrees(request: PlanRequest, section: MegatronConfig) -> Iterator[Degrees]:
    """Yield all factorizations of the world size; ``tp`` stays within a machine unless the configuration sets it."""
    asked_tensor, asked_pipeline = section.tensor_parallel_size, section.pipeline_parallel_size
    if request.mesh is not None:
        asked_tensor = asked_tensor or request.mesh.get("tp", 1)
        asked_pipeline = asked_pipeline or request.mesh.get("pp", 1)
    for tensor in _divisors(request.world_size):
        if asked_tensor is None and tensor > request.ranks_per_node:
            continue
        for pipeline in _divisors(request.world_size // tensor):
            asked = asked_tensor in (None, tensor) and asked_pipeline in (None, pipeline)
            if asked and tensor * pipeline > 1:
                yield Degrees(tensor, pipeline, request.world_size // tensor // pipeline)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _estimate(made: PlannedModel, degrees: Degrees) -> Estimate:
    request, section = made.request, made.section
    layout = (PipelineEstimate if degrees.pipeline > 1 else TensorEstimate)(made, degrees)
    try:
        why = _why_not(request, section, degrees)
        return refused(layout.title, degrees.family, why) if why else layout.estimate()
    except DrivetrainError as problem:
        return refused(layout.title, degrees.family, problem.what)


def _why_not(request: PlanRequest, section: MegatronConfig, degrees: Degrees) -> str:
    if request.accumulation(degrees.data) is None:
        return request.indivisible(degrees.data)
    if degrees.data > 1 and section.data_parallel != "ddp":
        return f"data_parallel: {section.data_parallel} beside tp and pp is not modelled; plan with data_parallel: ddp"
    if section.sequence_parallel:
        return "sequence_parallel is not modelled; plan without it, or try it with a short run"
    if not request.optimizer.elementwise:
        return f"{request.optimizer.name} is not element-wise, and a rank steps on parts of the parameters"
    return ""
