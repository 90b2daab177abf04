"""Replaces the parameters of an existing optimizer by the sharded ones of the same name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.api import Topology
from drivetrain_fsdp.shards import from_rank_zero, local_device, part_like
from drivetrain_sharding import FormerParameters

logger = logging.getLogger(__name__)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimizer holds, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def remap(optimizer: Optimizer, former: FormerParameters, module: nn.Module, topology: Topology) -> None:
    """Replace former parameters by those of the same name, in place, and shard their state alike.

    Groups keep their order and hyper-parameters. State that is shaped like its parameter becomes sharded like it, from
    rank 0's values; other state (a step count) stays. Collective over all ranks when there is state.
    """
    present = dict(module.named_parameters())
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            name = former.name(old)
            if name is None:
                continue
            new = present[name]
            state = optimizer.state.pop(old, None)
            group["params"][index] = new
            if state is not None:
                optimizer.state[new] = {slot: _cut(value, new, topology) for slot, value in state.items()}
        _one_kind(group, present)


def _cut(value: Any, new: Tensor, topology: Topology) -> Any:
    # `new` has the shape of the whole also when it is sharded.
    if not isinstance(value, Tensor) or value.shape != new.shape or not value.dim():
        return value
    read = from_rank_zero(value, value, topology)
    return part_like(new.detach(), read, dtype=new.dtype, device=local_device(new))


def _one_kind(group: dict[str, Any], present: Mapping[str, Tensor]) -> None:
    """Disable fused and foreach kernels for groups that mix plain and sharded tensors."""
    own = {id(parameter) for parameter in present.values()}
    kinds = {isinstance(parameter, DTensor) for parameter in group["params"] if id(parameter) in own}
    if len(kinds) < 2:
        return
    for how in ("foreach", "fused"):
        if how in group:
            if group[how]:
                logger.warning("An optimizer group holds 0-d parameters beside sharded ones; %s is off for it.", how)
            group[how] = False
