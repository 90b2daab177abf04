"""Splits a model into stages by the order in which one forward calls its modules and reads its parameters.

Nothing is assumed about how the model is written. A stage begins at the call of a module; a parameter belongs to the
stages that read it, to several when it is tied across them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.api import UsageError
from drivetrain.api.engines import trees
from drivetrain_megatron.pipeline.timeline import Timeline


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Args:
        points: name of the module at which each stage but the first begins, in order.
        parameters: stages that read a parameter, by its first name, ascending. One that nothing reads belongs to the
            last.
        modules: the stage in which a module is called first, by name; what is never called belongs to the last.
    """

    points: tuple[str, ...]
    parameters: dict[str, tuple[int, ...]]
    modules: dict[str, int]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.points) + 1


def cut_at(module: nn.Module, timeline: Timeline, points: Sequence[str], whose: str) -> Cut:
    """Cut at these modules.

    Args:
        module: the model.
        timeline: one forward of it.
        points: names, in the order of their calls.
        whose: the source of the names, for errors.

    Raises:
        UsageError: a name is wrong, or a stage cannot begin there.
    """
    called = dict(timeline.once())
    for name in points:
        if name in called:
            continue
        if name not in timeline.calls:
            known = [one for one, _ in module.named_modules()]
            near = difflib.get_close_matches(name, list(called) if name in known else known, 1)
            problem = "is never called in forward" if name in known else "is not a module of the model"
            raise UsageError(
                f"{name!r}, at which {whose} begins a pipeline stage, {problem}",
                cure=f"Did you mean {near[0]!r}?" if near else "Name a module that forward calls once.",
            )
        raise UsageError(
            f"{name!r}, at which {whose} begins a pipeline stage, is called {len(timeline.calls[name])} times in one "
            "forward",
            cure="Name a module that forward calls once.",
        )
    times = [called[name].began for name in points]
    if times != sorted(times):
        right = sorted(points, key=lambda name: called[name].began)
        raise UsageError(
            f"the pipeline stages of {whose} begin in another order than forward calls them",
            cure=f"Write them as {', '.join(right)}.",
        )

    def stage(time: int) -> int:
        return sum(time >= began for began in times)

    last = len(points)
    parameters = {
        name: tuple(sorted({stage(time) for time in timeline.uses.get(name, ())})) or (last,)
        for name, _ in module.named_parameters()
    }
    modules = {
        name: min((stage(call.began) for call in timeline.calls.get(name, ())), default=last)
        for name, _ in module.named_modules()
    }
    return Cut(tuple(points), parameters, modules)


def balanced(
    module: nn.Module, timeline: Timeline, num_stages: int, costs: Callable[[Sequence[str]], Sequence[float]]
) -> tuple[str, ...]:
    """Cut between the blocks of the model so that the most expensive stage is as cheap as possible.

    Candidates are the blocks of the lists that a Transformers model names in its ``_pp_plan``, else of the longest
    ``ModuleList`` (and of others of that length and those classes of blocks); of a model without one that is long
    enough, every module that forward calls once. Embeddings and heads count, where forward reads them first.

    Args:
        module: the model.
        timeline: one forward of it.
        num_stages: how many stages.
        costs: given the candidates, what it costs to compute from each of them to the next, and before the first.

    Raises:
        UsageError: there are not enough places to cut.
    """
    candidates = _candidates(module, timeline, num_stages)
    if len(candidates) < num_stages - 1:
        called = [name for name, _ in timeline.once() if name and name not in timeline.ungraded]
        most = f"{len(candidates) + 1} or less" if candidates else "1"
        able = f"of the modules that its forward calls once ({', '.join(called[:8])}), {len(candidates) or 'none'} can"
        raise UsageError(
            f"{type(module).__name__} cannot be cut into {num_stages} pipeline stages: "
            f"{able if called else 'its forward calls no module once that could'} begin a second or later stage"
            + _ungraded(timeline),
            cure=f"Use pipeline_parallel_size: {most}, or divide what forward computes into more modules.",
        )
    return tuple(candidates[index - 1] for index in partition(costs(candidates), num_stages))


def _ungraded(timeline: Timeline) -> str:
    if not timeline.ungraded:
        return ""
    return (
        f", and {len(timeline.ungraded)} more where gradients are not recorded: under torch.no_grad(), or in "
        "checkpoint(...), for which use_reentrant=False is the cure"
    )


def _candidates(module: nn.Module, timeline: Timeline, num_stages: int) -> list[str]:
    called = [name for name, _ in timeline.once() if name and name not in timeline.ungraded]
    found = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    lists = {
        name: [f"{name}.{index}" for index in range(len(module.get_submodule(name)))]  # type: ignore[arg-type]
        for name in found
        # A list inside of a block is not a list of blocks.
        if not any(name.startswith(f"{other}.") for other in found)
    }
    # Transformers' word for the parts that its own pipelines keep together; no other model has it.
    planned = trees.attribute(module, "_pp_plan") or {}
    lists = {name: inside for name, inside in lists.items() if name in planned} or lists
    blocks = {name: [block for block in inside if block in set(called)] for name, inside in lists.items()}
    if blocks:
        longest = max(blocks, key=lambda name: len(blocks[name]))
        if len(blocks[longest]) >= num_stages:
            kinds = {type(module.get_submodule(block)) for block in blocks[longest]}
            alike = {
                block
                for inside in blocks.values()
                for block in inside
                if type(module.get_submodule(block)) in kinds and len(inside) == len(blocks[longest])
            }
            return [name for name in called if name in alike]
    # Not the first module that is called: the stage before it would be empty.
    leaf_first = [name for name in called if not _contains(name, called)]
    return leaf_first[1:]


def _contains(name: str, called: Sequence[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in called)


def parameter_bytes(module: nn.Module, timeline: Timeline, candidates: Sequence[str]) -> list[float]:
    """Bytes of the parameters that forward reads first before, between and after the calls of these modules."""
    times = [timeline.calls[name][0].began for name in candidates]
    pieces = [0.0] * (len(candidates) + 1)
    for name, parameter in module.named_parameters():
        uses = timeline.uses.get(name)
        piece = sum(min(uses) >= began for began in times) if uses else len(candidates)
        pieces[piece] += parameter.numel() * parameter.element_size()
    return pieces


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Split a row of costs into consecutive parts, the most expensive of which is as cheap as can be.

    Of equal ones the most even is taken (least sum of squares).

    Args:
        costs: at least ``parts`` of them, each at least 0.
        parts: at least 1.

    Returns:
        Where each part but the first begins, ``parts - 1`` indices. No part is empty.
    """
    assert 1 <= parts <= len(costs), "fewer pieces than parts"
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: (largest part, sum of squares, beginnings) of the first `end` pieces in the present number of parts.
    best: dict[int, tuple[float, float, list[int]]] = {
        end: (sums[end], sums[end] ** 2, []) for end in range(1, len(costs) + 1)
    }
    for part in range(2, parts + 1):
        following: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(part, len(costs) + 1):
            following[end] = min(
                (
                    max(best[start][0], sums[end] - sums[start]),
                    best[start][1] + (sums[end] - sums[start]) ** 2,
                    [*best[start][2], start],
                )
                for start in range(part - 1, end)
            )
        best = following
    return best[len(costs)][2]
