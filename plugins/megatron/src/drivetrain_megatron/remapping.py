"""Replaces parameters in existing optimizers by their shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_sharding import FormerParameters


@torch.no_grad()
def remap(
    optimizer: Optimizer,
    former: FormerParameters,
    module: nn.Module,
    cut: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Exchange former parameters for those of the same name, in place; groups keep order and hyper-parameters.

    Args:
        optimizer: made for the former parameters.
        former: what they were called.
        module: where their names lead now.
        cut: ``cut(whole, parameter)``, this rank's part of state that is shaped like the whole parameter.
    """
    present = dict(module.named_parameters())
    here = set(map(id, present.values()))
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            name = former.name(old)
            # The script may have moved what was not replaced to another name, or taken it out of the model.
            new = None if name is None or id(old) in here else present.get(name)
            if new is None:
                continue
            state: dict[str, Any] | None = optimizer.state.pop(old, None)
            group["params"][index] = new
            if state is not None:
                optimizer.state[new] = {slot: _cut(value, old, new, cut) for slot, value in state.items()}
        one_kernel(group)


def _cut(value: Any, old: Tensor, new: Tensor, cut: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return cut(value, new) if isinstance(value, Tensor) and value.dim() and value.shape == old.shape else value


def one_kernel(group: dict[str, Any]) -> None:
    """Plain tensors and DTensors, or DTensors of two meshes, cannot go through one fused or foreach kernel."""
    kinds = {one.device_mesh if isinstance(one, DTensor) else None for one in group["params"]}
    if len(kinds) > 1:
        for how in ("foreach", "fused"):
            if how in group:
                group[how] = False
