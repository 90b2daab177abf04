"""Computes what each rank holds under ``engine: megatron_core``, from the model's description."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.core_engine.description import Correspondence, Description
from drivetrain_megatron.planner.layout import WHOLE, Held, Layout

REMARK = (
    "Counted are Megatron-Core's parameters; those that lie otherwise in the model, such as queries, keys and values, "
    "are there a second time."
)
_BY_DIM = {0: "column-parallel", 1: "row-parallel"}
"""Weights are ``[out, in]`` in Megatron-Core."""


def layout_of(model: nn.Module, degree: int, pipeline_ranks: int, section: MegatronConfig) -> Layout:
    """The layout that training would begin with; nothing is built for it. Not collective.

    Args:
        model: of Transformers, or a ``GPTModel``; its parameters may be on meta.
        degree: ranks of the axis ``tp``.
        pipeline_ranks: ranks of the axis ``pp``.
        section: the configuration.

    Raises:
        BackendBlockedError: Megatron-Core is not installed.
        UnsupportedError: Megatron-Core cannot compute the model.
        UsageError: sizes that do not divide, keys of the other engine, experts without sequence parallelism.
    """
    from drivetrain_megatron.core_engine import parallel_state

    parallel_state.check(section)
    with warnings.catch_warnings():
        # Megatron-Core warns at import of missing NVIDIA kernels, which the layout does not use.
        warnings.simplefilter("ignore")
        from drivetrain_megatron.core_engine.describing import describe

        whole = describe(model, 0, 1, pipeline_ranks, section)
        parts = [describe(model, rank, degree, pipeline_ranks, section) for rank in range(degree)]
    parameters = dict(model.named_parameters())
    held: list[Held] = []
    for place, each in enumerate(whole.correspondences):
        shapes = _shapes(each, whole, parameters, 0, 1)
        local = [
            _shapes(part.correspondences[place], part, parameters, rank, degree) for rank, part in enumerate(parts)
        ]
        size = parameters[each.ours[0]].element_size()
        for number, name in enumerate(each.theirs):
            on_ranks = [found[number] for found in local]
            style = _style(name, shapes[number], on_ranks[0])
            stages = tuple(whole.stages(name, pipeline_ranks))
            of = () if each.ours == (name,) else each.ours
            held.append(Held(name, style, shapes[number], on_ranks, size, stages, of))
    modules = [_modules(whole, stage, pipeline_ranks) for stage in range(pipeline_ranks)]
    source = "Megatron-Core's own layers" if degree > 1 else ""
    cut = "Megatron-Core, which gives each as many layers" if pipeline_ranks > 1 else ""
    name, ranks = type(model).__name__, tuple(range(pipeline_ranks))
    remark = REMARK if any(one.of for one in held) else ""
    return Layout(name, "megatron_core", source, cut, degree, ranks, modules, held, remark)


def _shapes(
    each: Correspondence, description: Description, parameters: dict[str, nn.Parameter], rank: int, degree: int
) -> list[tuple[int, ...]]:
    """Shapes of Megatron-Core's parameters on one rank: the user's parts, joined as training joins them."""

    def part(name: str) -> Tensor:
        layout, one = description.layouts.get(name), parameters[name]
        shape = tuple(one.shape) if layout is None else layout.local_shape(rank, degree)
        return torch.empty(shape, dtype=one.dtype, device="meta")

    return [tuple(one.shape) for one in each.how.join([part(name) for name in each.ours])]


def _style(name: str, whole: tuple[int, ...], local: tuple[int, ...]) -> str:
    """Return the style of a parameter, by the dim that is sharded."""
    changed = [dim for dim, (before, after) in enumerate(zip(whole, local, strict=True)) if before != after]
    if not changed:
        return WHOLE
    return "vocab-parallel" if name.startswith("embedding.") else _BY_DIM.get(changed[0], f"dim {changed[0]}")


def _modules(description: Description, stage: int, num_stages: int) -> list[str]:
    """Megatron-Core's modules of a stage; layers are counted over the whole model."""
    size = description.num_layers // num_stages
    layers = [f"decoder.layers.{index}" for index in range(stage * size, (stage + 1) * size)]
    first = ["embedding"] if stage == 0 else []
    return first + layers + (["decoder.final_layernorm", "output_layer"] if stage == num_stages - 1 else [])
