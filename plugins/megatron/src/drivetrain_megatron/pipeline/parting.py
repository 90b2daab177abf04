"""Frees the parameters of stages that run on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import portable
from drivetrain_megatron.pipeline.cutting import Cut
from drivetrain_megatron.pipeline.skeleton import Blanks, Elsewhere, showing_gradients, unaware
from drivetrain_megatron.replicas import local_part
from drivetrain_sharding import STEPPED_LOCALLY, laid_out_as, step_hooks


@dataclass(frozen=True)
class Share:
    """Assignment of parameters and buffers to pipeline ranks.

    Args:
        owners: for each parameter, by first name, the pipeline ranks that hold it, ascending.
        buffer_owners: for each buffer the rank whose value counts.
        rank: this rank's place in the pipeline.
        names: of parameters and buffers, by their names in a checkpoint, where a part of the model is wrapped.
    """

    owners: dict[str, tuple[int, ...]]
    buffer_owners: dict[str, int]
    rank: int
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, cut: Cut, rank_of_stage: Callable[[int], int], rank: int) -> Share:
        """Read it off the cut."""
        owners = {
            name: tuple(sorted({rank_of_stage(stage) for stage in stages})) for name, stages in cut.parameters.items()
        }
        buffers = {name: rank_of_stage(cut.modules[name.rpartition(".")[0]]) for name, _ in module.named_buffers()}
        saved = portable.first_names(module)
        held = (*module.named_parameters(), *module.named_buffers())
        return cls(owners, buffers, rank, {saved[id(one)]: name for name, one in held})

    def mine(self, saved_name: str) -> bool:
        """Whether this rank gives a parameter or buffer to a checkpoint: of several that hold it, the first."""
        name = self.names.get(saved_name, saved_name)
        if name in self.owners:
            return self.owners[name][0] == self.rank
        return self.buffer_owners.get(name, self.rank) == self.rank

    def holds(self, saved_name: str) -> bool:
        """Whether a parameter, or the buffer that counts, is here."""
        name = self.names.get(saved_name, saved_name)
        return self.rank in self.owners.get(name, ()) or self.buffer_owners.get(name) == self.rank

    def shared(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Parameters that several ranks hold, which this one does too, in order."""
        for name, ranks in self.owners.items():
            if len(ranks) > 1 and self.rank in ranks:
                yield name, ranks


def drop_foreign(
    module: nn.Module, share: Share, blanks: Blanks, optimizers: Sequence[Optimizer], device: torch.device | None
) -> None:
    """Replace the parameters of other ranks by ones without memory, in the module and in its optimizers.

    Args:
        module: holds every parameter.
        share: the assignment.
        blanks: gives parameters without memory.
        optimizers: of this module; their state for such parameters is dropped.
        device: where this rank's parameters go; ``None`` leaves them.
    """
    first = {id(one): name for name, one in module.named_parameters()}
    absent: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):  # noqa: SLF001 (assigning by name asks for more)
            if parameter is None:
                continue
            if share.holds(first[id(parameter)]):
                if device is not None:
                    parameter.data = parameter.data.to(device)
                continue
            if id(parameter) not in absent:
                blank = Elsewhere.of(blanks.absent_parameter(parameter), first[id(parameter)])
                blank.take_hooks(parameter)
                absent[id(parameter)] = blank  # type: ignore[assignment]
            part._parameters[name] = absent[id(parameter)]  # noqa: SLF001
    if device is not None:
        for part in module.modules():
            for name, buffer in list(part._buffers.items()):  # noqa: SLF001
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)  # noqa: SLF001
    for optimizer in optimizers:
        exchange(optimizer, absent)


def exchange(optimizer: Optimizer, absent: dict[int, nn.Parameter]) -> None:
    """Give an optimizer the parameters without memory; it finds no gradient on them and passes them over."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in absent:
                optimizer.state.pop(parameter, None)
                group["params"][index] = absent[id(parameter)]


@contextmanager
def without_absent(optimizer: Optimizer) -> Iterator[None]:
    """Restrict a script's own optimizer to this rank's parameters: not every optimizer skips those without gradient.

    Step hooks get all parameters. They skip those of other stages for operations on single parameters; reading values
    or gradients of those raises, since a norm would be that of one stage.
    """
    groups = list(optimizer.param_groups)
    whole = [group["params"] for group in groups]
    # Torch's own optimizers skip parameters without gradient.
    asks = type(optimizer) in STEPPED_LOCALLY
    here = whole if asks else [[one for one in params if not isinstance(one, Elsewhere)] for params in whole]
    found = [(hooks, key, hooks[key]) for hooks, key in step_hooks(optimizer)]

    def give(params: list[Any]) -> None:
        for group, its in zip(groups, params, strict=True):
            group["params"] = its

    def called(hook: Callable[..., Any], *given: Any) -> Any:
        give(whole)
        absent = [one for params in whole for one in params if isinstance(one, Elsewhere)]
        try:
            with showing_gradients(absent), unaware():
                return hook(*given)
        finally:
            give(here)

    give(here)
    for hooks, key, hook in found:
        hooks[key] = partial(called, hook)
    try:
        yield
    finally:
        give(whole)
        for hooks, key, hook in found:
            if key in hooks:
                hooks[key] = hook


@torch.no_grad()
def add_shared_gradients(parameters: dict[str, nn.Parameter], share: Share, group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters that several stages hold. Collective over the pipeline.

    Args:
        parameters: by name, those that are trained, which are the same on all stages.
        share: the assignment.
        group: the ranks of the pipeline.
    """
    sent: list[dist.P2POp] = []
    received: list[tuple[str, list[Tensor]]] = []
    own: dict[str, Tensor] = {}
    for name, ranks in share.shared():
        if name not in parameters:
            continue
        parameter = parameters[name]
        added = local_part(parameter.grad) if parameter.grad is not None else torch.zeros_like(local_part(parameter))
        own[name] = added = added.contiguous()
        others = []
        for rank in ranks:
            if rank != share.rank:
                peer = dist.get_global_rank(group, rank)
                others.append(torch.empty_like(added))
                sent += [
                    dist.P2POp(dist.isend, added, peer, group),
                    dist.P2POp(dist.irecv, others[-1], peer, group),
                ]
        received.append((name, others))
    if sent:
        for work in dist.batch_isend_irecv(sent):
            work.wait()
    for name, others in received:
        total = own[name]
        elsewhere = [rank for rank in share.owners[name] if rank != share.rank]
        # In order of ranks, so that the sum has the same digits on all of them.
        pairs = sorted([(share.rank, total), *zip(elsewhere, others, strict=True)], key=lambda pair: pair[0])
        added = torch.stack([value for _, value in pairs]).sum(0)
        parameters[name].grad = laid_out_as(parameters[name], added)
