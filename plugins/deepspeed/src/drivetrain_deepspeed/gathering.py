"""Gathers full tensors from the ranks' ranges, one parameter or a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor, nn

from drivetrain.api import plain_state_dict
from drivetrain_deepspeed.layout import FlatGroup, Piece, flat_groups, partition_of, partitioned

_ELEMENTS = 1 << 18
"""Number of elements of each rank that are gathered at a time."""


def full_tensors(module: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of each state dict entry. Collective over the ranks that share the parameters.

    Every rank iterates to the end and holds one gathered tensor at a time.

    Args:
        module: the user's.
        optimizer: ``engine.optimizer``.
    """
    trained = {id(piece.parameter): (flat, piece) for flat in flat_groups(optimizer) for piece in flat.pieces}
    cut = {id(piece.parameter): piece for piece in partitioned(module)}
    for name, tensor in plain_state_dict(module, keep_vars=True).items():
        if id(tensor) in trained:
            yield name, _trained(*trained[id(tensor)], in_parts=id(tensor) in cut)
        elif id(tensor) in cut:
            yield name, _joined(cut[id(tensor)], partition_of(tensor))
        else:
            yield name, tensor.detach() if isinstance(tensor, Tensor) else tensor


@torch.no_grad()
def _trained(flat: FlatGroup, piece: Piece, *, in_parts: bool) -> Tensor:
    parameter: Any = piece.parameter
    master = flat.flat.detach()
    if in_parts:
        return _joined(piece, master[piece.at : piece.at + parameter.partition_numel()])
    if parameter.dtype == master.dtype:
        same: Tensor = parameter.detach()  # Replicated on every rank, and equal to the master values.
        return same
    whole = torch.zeros(parameter.numel(), dtype=master.dtype, device=parameter.device)
    whole[piece.start : piece.start + piece.numel] = master[piece.at : piece.at + piece.numel]
    comm.all_reduce(whole, group=parameter._dp_group)  # noqa: SLF001  As DeepSpeed's own get_full_hp_param does.
    return whole.view(piece.shape)


@torch.no_grad()
def _joined(piece: Piece, part: Tensor) -> Tensor:
    """The parameter out of every rank's part, padding included, of one size on all ranks."""
    parameter: Any = piece.parameter
    group = parameter.ds_process_group
    mine = part.to(parameter.device)
    whole = torch.empty(mine.numel() * comm.get_world_size(group=group), dtype=mine.dtype, device=mine.device)
    comm.all_gather_into_tensor(whole, mine, group=group)
    return whole[: parameter.ds_numel].view(piece.shape)


@torch.no_grad()
def update_whole(optimizer: Any) -> None:
    """Give every rank the parameters of ZeRO-1 and 2 that follow from the ranks' master values. Collective.

    As DeepSpeed's own ``update_lp_params``, which needs the memory of a whole group beside where the communication
    backend is gloo (measured: 128 MiB for 128 MiB).
    """
    every = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
    for parts, master, group in zip(*every, optimizer.real_dp_process_group, strict=True):
        mine = parts[comm.get_rank(group=group)]
        mine.copy_(master)
        for start in range(0, mine.numel(), _ELEMENTS):
            cut = mine[start : start + _ELEMENTS]
            gathered = torch.empty(len(parts) * cut.numel(), dtype=cut.dtype, device=cut.device)
            comm.all_gather_into_tensor(gathered, cut, group=group)
            for part, piece in zip(parts, gathered.chunk(len(parts)), strict=True):
                part[start : start + _ELEMENTS].copy_(piece)
