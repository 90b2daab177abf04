"""Computes what each rank holds under ``engine: torch``, from the stages and the plan of the start of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.cutting import Cut, cut_at, parameter_bytes
from drivetrain_megatron.pipeline.planning import points_of
from drivetrain_megatron.pipeline.schedules import rank_of_stage, stages_per_rank, wanted_parts
from drivetrain_megatron.pipeline.skeleton import Skeleton
from drivetrain_megatron.pipeline.timeline import Timeline, record
from drivetrain_megatron.planner.layout import WHOLE, Held, Layout
from drivetrain_megatron.planner.models import Arguments
from drivetrain_megatron.tensor.plan import Row, table
from drivetrain_megatron.tensor.trace import guessed_arguments

_CPU = torch.device("cpu")


def layout_of(
    model: nn.Module, degree: int, pipeline_ranks: int, section: MegatronConfig, arguments: Arguments | None = None
) -> Layout:
    """The layout that training would begin with.

    Args:
        model: its parameters may be on meta.
        degree: ranks of the axis ``tp``.
        pipeline_ranks: ranks of the axis ``pp``.
        section: the configuration.
        arguments: of a forward, which shows where the model can be cut; guessed where they are not given.

    Raises:
        UsageError: as training would; no guess at the inputs made forward run.
    """
    ranks_of_stages: tuple[int, ...] = (0,)
    modules, cut, whose = [[name for name, _ in model.named_children()]], None, ""
    if pipeline_ranks > 1:
        wanted_parts(section, pipeline_ranks)
        num_stages = pipeline_ranks * stages_per_rank(section)
        timeline, cut, whose = _cut(model, num_stages, section, arguments)
        ranks_of_stages = tuple(rank_of_stage(section, stage, pipeline_ranks) for stage in range(num_stages))
        modules = [_modules(timeline, cut, stage) for stage in range(num_stages)]
    # One rank holds everything whole; a plan is looked for all the same where nothing else was asked for.
    source, rows = table(model, degree, section.tp_plan) if degree > 1 or cut is None else ("", _whole(model))
    sizes = {name: one.element_size() for name, one in model.named_parameters()}
    ties = _ties(model)
    held = [
        Held(
            row.name,
            row.style,
            row.shape,
            row.local_shapes,
            sizes[row.name],
            cut.parameters[row.name] if cut is not None else (0,),
            tied=ties[row.name],
        )
        for row in rows
    ]
    name, remark = type(model).__name__, _remark(section)
    return Layout(name, "torch", source, whose, degree, ranks_of_stages, modules, held, remark)


def _remark(section: MegatronConfig) -> str:
    if section.data_parallel == "fsdp":
        return "data_parallel: fsdp shares these out over the data-parallel ranks as well."
    return ""


def _whole(model: nn.Module) -> list[Row]:
    return [Row(name, WHOLE, tuple(one.shape), [tuple(one.shape)]) for name, one in model.named_parameters()]


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the further names of each tied parameter, by its first name."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, one in model.named_parameters(remove_duplicate=False):
        names[id(one)].append(name)
    return {each[0]: tuple(each[1:]) for each in names.values()}


def _cut(
    model: nn.Module, num_stages: int, section: MegatronConfig, arguments: Arguments | None
) -> tuple[Timeline, Cut, str]:
    skeleton = Skeleton(model, _CPU)
    for part in skeleton.module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta:
                # Assigning by name asks whether it is saved.
                part._buffers[name] = skeleton.absent(tuple(buffer.shape), buffer.dtype, _CPU)  # noqa: SLF001
    timeline = _timeline(skeleton, [arguments] if arguments is not None else list(guessed_arguments(model)))

    def costs(candidates: Sequence[str]) -> Sequence[float]:
        return parameter_bytes(skeleton.module, timeline, candidates)

    points, whose = points_of(skeleton, timeline, section, num_stages, costs)
    if section.balance == "time" and whose.startswith("balance"):
        whose = "balance of bytes (balance: time measures the first batch and may decide otherwise)"
    return timeline, cut_at(skeleton.module, timeline, points, whose), whose


def _timeline(skeleton: Skeleton, guesses: Sequence[Arguments]) -> Timeline:
    problems = []
    for args, kwargs in guesses:
        try:
            with torch.no_grad():
                return record(skeleton, lambda forward: forward(), *args, **kwargs)
        except Exception as problem:  # noqa: BLE001 (a user's forward raises anything; it is reported)
            skeleton.opaque.clear()
            problems.append(f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}")
    raise UsageError(
        f"the forward of {type(skeleton.module).__name__}, which shows where the model can be cut, does not run: "
        f"{'; '.join(problems[:3])}",
        cure="Name a function that returns the arguments of a forward: --batch train.py:function.",
    )


def _modules(timeline: Timeline, cut: Cut, stage: int) -> list[str]:
    """The largest modules that a stage computes whole, in the order of their calls."""
    inside: dict[str, set[int]] = defaultdict(set)
    for name in filter(None, timeline.calls):
        words = name.split(".")
        for end in range(1, len(words) + 1):
            inside[".".join(words[:end])].add(cut.modules[name])
    whole = {name for name, stages in inside.items() if stages == {stage}}
    largest = [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]

    def began(name: str) -> int:
        inner = [called for called in timeline.calls if f"{called}.".startswith(f"{name}.")]
        return min(timeline.calls[called][0].began for called in inner)

    return sorted(largest, key=began)
