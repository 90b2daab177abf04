"""Applies FSDP2 along the data-parallel axis, to blocks and to layers outside of them.

Every unit is a root of its own for torch, since the modules above it may be left in the middle of their forward, where
a pipeline stage ends. Gradients are reduced at each micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_megatron.data_shards import DataShard, as_shard, refuse_autograd
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.replicas import local_part
from drivetrain_sharding import (
    FormerParameters,
    convert_gradients,
    hear_of_backwards,
    keep_class_name,
    keep_gathered_memory,
    laid_out_as,
    parameter_groups,
    refuse_as_data,
    refuse_max_norm,
    refuse_other_values,
    sharded_parameters,
    watch_forwards,
)

_USER, _ENGINE = "drivetrain-megatron", "data_parallel: fsdp"


def shard(
    module: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer], shared: Collection[nn.Parameter] = ()
) -> tuple[FormerParameters, list[Any]]:
    """Cut a module's parameters into shards, in place, and give them to its optimizers. Collective over ``dp``.

    Parameters that are tied, without dims, shared by stages, of recurrent layers, or held directly by a module that
    holds other modules stay whole.

    Args:
        module: the same values on every data-parallel rank; parameters may be shared over ``tp`` already, and some may
            be without values, which are left alone.
        mesh: of the job, with the axis ``dp``.
        optimizers: those that hold its parameters.
        shared: parameters that other pipeline stages hold too.

    Returns:
        What the parameters were before, and torch's parameter groups.
    """
    refuse_max_norm(module, _ENGINE)
    former = FormerParameters(module)
    names = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
    left = {name: (vars(one), None if is_absent(one) else one.grad) for name, one in module.named_parameters()}
    units = []
    # A recurrent layer keeps a list of its weights, which is written when they are gathered.
    kept = set(shared).union(*(one.parameters() for one in module.modules() if isinstance(one, nn.RNNBase)))
    for unit in _units(module):
        whole = {one for one in unit.parameters() if names[id(one)] > 1 or not one.dim() or one in kept}
        if any(one not in whole for one in unit.parameters()):
            for one in unit.parameters():
                if not one.is_contiguous():  # which fully_shard does not take
                    one.data = one.detach().contiguous()
            # Freed after forward: between its forward and its backward a stage works on other micro-batches.
            units.append(fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=True, ignored_params=whole))
            keep_class_name(unit)
    groups = _guard(module, units)
    _take_over(module, left)
    for optimizer in optimizers:
        remap(optimizer, former, module, part)
    former.close(module, "megatron put one in shards over data-parallel ranks")
    return former, groups


def _take_over(module: nn.Module, left: Mapping[str, tuple[dict[str, Any], Tensor | None]]) -> None:
    """Set on each parameter what a script had set on the one that it replaces, by name: attributes and a gradient."""
    for name, one in module.named_parameters():
        attributes, gradient = left[name]
        if attributes is not vars(one):
            vars(one).update({key: value for key, value in attributes.items() if not hasattr(type(one), key)})
            if gradient is not None and one.grad is None:
                one.grad = as_shard(cast("DTensor", part(gradient, one)))


def _guard(module: nn.Module, units: Sequence[FSDPModule]) -> list[Any]:
    """Make scripts raise where what they do with shards, or in a forward, would be wrong or lost. Not collective."""
    groups = parameter_groups(units, _USER)
    convert_gradients(groups, as_shard)
    for parameter in sharded_parameters(groups):
        as_shard(cast("DTensor", parameter))
        refuse_autograd(parameter)
    refuse_as_data(DataShard)
    keep_gathered_memory(groups, _USER)
    hear_of_backwards(groups, _ENGINE)
    refuse_other_values(groups, _ENGINE)
    watch_forwards(module, groups, _ENGINE)
    return groups


def _units(module: nn.Module) -> list[nn.Module]:
    """Blocks of the outermost lists, then layers outside of these; each of them wholly on this rank."""
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    blocks = {f"{name}.{index}" for name in outermost for index, _ in enumerate(module.get_submodule(name).children())}
    chosen = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        is_layer = name and not inside and not any(True for _ in part.children())
        held = [one for one in part.parameters() if not is_absent(one)]
        if (name in blocks or is_layer) and held and len(held) == len(list(part.parameters())):
            chosen.append(part)
    return chosen


@torch.no_grad()
def part(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of optimizer state that is laid out as the parameter was before it was cut."""
    if not isinstance(parameter, DTensor) or "dp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return whole
    rank, size = parameter.device_mesh["dp"].get_local_rank(), parameter.device_mesh["dp"].size()
    own = local_part(whole)
    each = -(-own.shape[0] // size)
    local = own[each * rank : each * (rank + 1)].clone()
    return laid_out_as(parameter, local)
