"""Applies FSDP2 along the data-parallel axis, to blocks and to layers outside of them.

Every unit is a root of its own for torch, since the modules above it may be left in the middle of their forward, where
a pipeline stage ends. Gradients are reduced at each micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.remapping import remap
from drivetrain_megatron.replicas import local_part
from drivetrain_sharding import FormerParameters, laid_out_as


def shard(module: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> FormerParameters:
    """Cut a module's parameters into shards, in place, and give them to its optimizers. Collective over ``dp``.

    Parameters that are tied, without dims, or held directly by a module that holds other modules stay whole.

    Args:
        module: the same values on every data-parallel rank; parameters may be shared over ``tp`` already, and some may
            be without values, which are left alone.
        mesh: of the job, with the axis ``dp``.
        optimizers: those that hold its parameters.

    Returns:
        What the parameters were before.
    """
    former = FormerParameters(module)
    names = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
    for unit in _units(module):
        whole = {one for one in unit.parameters() if names[id(one)] > 1 or not one.dim()}
        if any(one not in whole for one in unit.parameters()):
            # Freed after forward: between its forward and its backward a stage works on other micro-batches.
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=True, ignored_params=whole)
    for optimizer in optimizers:
        remap(optimizer, former, module, part)
    return former


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
