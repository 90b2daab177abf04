"""Copies values from the user's parameters to Megatron-Core's, and gradients back.

Where a part of the user's parameter lies in Megatron-Core's as it is, both are one memory. Where it does not (queries,
keys and values lie group by group) or has another dtype, the user's is a tensor of its own, copied before each run.
Optimizers, clipping and checkpoints see the user's parameters only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain_megatron.core_engine.calls import refuse
from drivetrain_megatron.core_engine.description import EMBEDDING, OUTPUT, Description
from drivetrain_megatron.core_engine.rearranging import Rearrangement
from drivetrain_megatron.replicas import local_part
from drivetrain_sharding import laid_out_as


@dataclass
class Pair:
    """Parameters of both sides that hold the same numbers.

    Args:
        names: of the user's.
        ours: the user's.
        theirs: Megatron-Core's.
        how: each rank's parts of the ones lie in the others.
        counts: this rank counts Megatron-Core's parameters in a norm over all ranks.
        one_memory: the user's are views of Megatron-Core's.
        views: gradients of the user's, in Megatron-Core's buffer.
    """

    names: tuple[str, ...]
    ours: list[nn.Parameter]
    theirs: list[nn.Parameter]
    how: Rearrangement
    counts: bool
    one_memory: bool = False
    views: list[Tensor] = field(default_factory=list)


@final
class Weights:
    """The parameters that this rank holds.

    Args:
        module: the user's; parameters of other pipeline stages have no values.
        model: this rank's ``GPTModel``.
        description: of the whole.
        stage: this rank's place in the pipeline.
        num_stages: of the pipeline.
        tp_rank: this rank's place on the axis ``tp``.
    """

    def __init__(
        self, module: nn.Module, model: nn.Module, description: Description, stage: int, num_stages: int, tp_rank: int
    ) -> None:
        self._module = module
        ours, theirs = dict(module.named_parameters()), dict(model.named_parameters())
        self.pairs: list[Pair] = []
        self._given: dict[nn.Parameter, Tensor] = {}
        offset = stage * (description.num_layers // num_stages)
        for each in description.correspondences:
            if stage not in description.stages(each.theirs[0], num_stages):
                continue
            names = [_here(name, offset, second=description.tied and stage > 0) for name in each.theirs]
            if not theirs.keys() >= set(names):
                raise refuse(module, f"its specification of layers does not construct {', '.join(each.ours)}")
            first = description.stages(each.theirs[0], num_stages)[0] == stage
            cut = any(name in description.layouts for name in each.ours)
            self.pairs.append(
                Pair(
                    each.ours,
                    [ours[name] for name in each.ours],
                    [theirs.pop(name) for name in names],
                    each.how,
                    counts=first and (cut or tp_rank == 0),
                )
            )
        if theirs:
            raise refuse(module, f"its specification of layers constructs more than it has: {', '.join(theirs)}")
        for pair in self.pairs:
            trained = {one.requires_grad for one in pair.ours}
            if len(trained) > 1:
                raise refuse(module, "some of its queries, keys, values or gates are frozen and others are not")
            for one in pair.theirs:
                one.requires_grad_(True in trained)

    @torch.no_grad()
    def share_memory(self) -> None:
        """Copy all values to Megatron-Core's parameters, and let the user's be views of them where that can be.

        Raises:
            UnsupportedError: a layer shards a parameter differently from the description.
        """
        for pair in self.pairs:
            parts = pair.how.join([local_part(one.detach()) for one in pair.ours])
            for one, part in zip(pair.theirs, parts, strict=True):
                if one.shape != part.shape:
                    found = f"{tuple(one.shape)} instead of {tuple(part.shape)}"
                    raise refuse(self._module, f"a layer holds {found} of {', '.join(pair.names)} on this rank")
        self.push()
        for pair in self.pairs:
            views = pair.how.split([one.detach() for one in pair.theirs])
            memory = {one.untyped_storage().data_ptr() for one in pair.theirs}
            pair.one_memory = all(
                view.untyped_storage().data_ptr() in memory and view.is_contiguous() and view.dtype == mine.dtype
                for mine, view in zip(pair.ours, views, strict=True)
            )
            if pair.one_memory:
                for mine, view in zip(pair.ours, views, strict=True):
                    _hold(mine, view)

    @torch.no_grad()
    def push(self) -> None:
        """Copy what has a memory of its own to Megatron-Core's parameters. Not collective."""
        for pair in self.pairs:
            if not pair.one_memory:
                pair.how.fill([one.detach() for one in pair.theirs], [local_part(one) for one in pair.ours])

    @torch.no_grad()
    def pull(self) -> None:
        """Copy the other way: Megatron-Core's parameters have stepped. Not collective."""
        for pair in self.pairs:
            if not pair.one_memory:
                values = pair.how.split([one.detach() for one in pair.theirs])
                for mine, value in zip(pair.ours, values, strict=True):
                    local_part(mine).copy_(value)

    def counts(self, theirs: Tensor) -> bool:
        """Whether this rank counts one of Megatron-Core's parameters in a norm over all ranks."""
        return any(pair.counts for pair in self.pairs if any(one is theirs for one in pair.theirs))

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Add Megatron-Core's reduced gradients to those of the user's parameters. Not collective.

        Where a parameter has none yet it gets a view of Megatron-Core's buffer.
        """
        for pair in self.pairs:
            if not pair.theirs[0].requires_grad:
                continue
            for mine, grad in zip(pair.ours, self._gradients(pair), strict=True):
                if mine.grad is None:
                    mine.grad = self._given[mine] = grad
                else:
                    mine.grad = mine.grad + grad

    def _gradients(self, pair: Pair) -> list[Tensor]:
        """Return the gradients of a pair in the buffer; if they are views of it, the same tensors each time."""
        if pair.views:
            return pair.views
        parts = pair.how.split([one.main_grad for one in pair.theirs])  # type: ignore[attr-defined]
        both = list(zip(pair.ours, parts, strict=True))
        found = [laid_out_as(mine, part.to(mine.dtype)) for mine, part in both]
        if pair.one_memory and all(mine.dtype == part.dtype for mine, part in both):
            pair.views = found
        return found

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Move gradients that are views of the buffer out of it, before the buffer is used again."""
        for parameter, grad in self._given.items():
            if parameter.grad is grad:
                parameter.grad = grad.clone()
        self._given.clear()

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Discard Megatron-Core's gradients of these user parameters."""
        dropped = {id(one) for one in parameters}
        for pair in self.pairs:
            if any(id(one) in dropped for one in pair.ours) and pair.theirs[0].requires_grad:
                for one in pair.theirs:
                    one.main_grad.zero_()  # type: ignore[attr-defined]

    @property
    def held(self) -> Sequence[nn.Parameter]:
        """The user's parameters on this rank."""
        return [one for pair in self.pairs for one in pair.ours]


def _here(name: str, offset: int, *, second: bool) -> str:
    """Return a parameter's name in this rank's part; a tied embedding is the output layer of the last stage."""
    if name == EMBEDDING and second:
        return OUTPUT
    if not name.startswith("decoder.layers."):
        return name
    start, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return f"decoder.layers.{int(start) - offset}.{rest}"


def _hold(parameter: nn.Parameter, local: Tensor) -> None:
    """Let a parameter's values on this rank lie in another memory; the parameter stays the same object."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local  # noqa: SLF001 (`.data` would leave it)
    else:
        parameter.data = local
