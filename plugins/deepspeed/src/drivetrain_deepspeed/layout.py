"""Maps parameters to their ranges in DeepSpeed's flat buffers on this rank.

ZeRO-1 and 2 lay the parameters of a group one after another and give each rank an equal part of that row; the
parameters themselves stay whole on every rank. ZeRO-3 cuts each parameter's row of elements into equal parts and lays
a rank's parts one after another. Either way a rank owns one range of each parameter, and master values, moments and
gradients of it are at one offset of a flat buffer. Nothing here is collective or changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_deepspeed.flatshard import FlatShard


def num_elements(parameter: Any) -> int:
    """Number of elements of the full parameter; under ZeRO-3 it is empty between uses."""
    found: int = parameter.ds_numel if is_zero_param(parameter) else parameter.numel()
    return found


@dataclass(frozen=True, eq=False)
class Piece:
    """The range of one parameter that this rank owns.

    Args:
        parameter: the module's.
        shape: of the whole parameter; under ZeRO-3 the parameter itself is empty between uses.
        start: first element of the range in the flattened parameter.
        at: first element of the range in the flat buffer.
        numel: length of the range; 0 where another rank owns all.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    at: int
    numel: int

    def of(self, flat: Tensor) -> FlatShard:
        """This range of any buffer that is laid out as the flat one is."""
        return FlatShard(flat.detach()[self.at : self.at + self.numel], self.start, self.shape)


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """One flat buffer of master values: what the inner optimizer takes for its only parameter.

    Args:
        flat: 1-d, live, with padding; key of the inner optimizer's state.
        group: index of the inner optimizer's parameter group.
        optimizer: the torch optimizer that updates it.
        pieces: of every parameter of the group, also those that have no element here.
    """

    flat: Tensor
    group: int
    optimizer: Optimizer
    pieces: tuple[Piece, ...]

    @property
    def state(self) -> dict[str, Any]:
        """The inner optimizer's live state; empty before its first step."""
        state: dict[str, Any] = self.optimizer.state.get(self.flat, {})
        return state


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """The flat buffers of a ZeRO optimizer; none where the engine has none (stage 0 in float32, no optimizer)."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage3(optimizer))
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(_stage12(optimizer))
    return []


def partitioned(module: nn.Module) -> list[Piece]:
    """Return ZeRO-3's partitions of all parameters in the compute dtype, frozen ones included; empty for other stages.

    ``at`` is 0: the flat buffer is the parameter's own ``ds_tensor``.
    """
    found = []
    each: Any
    for each in module.parameters():
        if is_zero_param(each):
            start, numel = _range(each)
            found.append(Piece(each, tuple(each.ds_shape), start, 0, numel))
    return found


def partition_of(parameter: Any) -> Tensor:
    """This rank's live part of a ZeRO-3 parameter in the compute dtype, 1-d, with padding."""
    part: Tensor = parameter.ds_tensor
    return part.detach()


def _stage12(optimizer: Any) -> Iterator[FlatGroup]:
    # Not by the links that DeepSpeed's universal checkpoint follows: they miss the order of round_robin_gradients.
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)  # Since 0.19.
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = comm.get_rank(group=optimizer.real_dp_process_group[index])
        low = rank * flat.numel()
        at, pieces = 0, []
        for number, parameter in enumerate(optimizer.round_robin_bit16_groups[index]):
            size = parameter.numel()
            first, last = max(at, low), min(at + size, low + flat.numel())
            if first < last:
                pieces.append(Piece(parameter, tuple(parameter.shape), first - at, first - low, last - first))
            else:
                pieces.append(Piece(parameter, tuple(parameter.shape), 0, 0, 0))
            at += size + (paddings[index][number] if paddings else 0)
        yield FlatGroup(flat, index, optimizer.optimizer, tuple(pieces))


def _stage3(optimizer: Any) -> Iterator[FlatGroup]:
    for index, (parameters, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        at, pieces = 0, []
        for parameter in parameters:
            start, numel = _range(parameter)
            pieces.append(Piece(parameter, tuple(parameter.ds_shape), start, at, numel))
            at += parameter.partition_numel()
        inner = optimizer.optimizer
        if optimizer.offload_optimizer and optimizer.subgroup_to_device[index] != "cpu":
            inner = optimizer.backup_optimizer  # Of the part that offload_optimizer.ratio leaves on the device.
        yield FlatGroup(flat, optimizer.sub_group_to_group_id[index], inner, tuple(pieces))


def _range(parameter: Any) -> tuple[int, int]:
    size, whole = parameter.partition_numel(), parameter.ds_numel
    start = min(comm.get_rank(group=parameter.ds_process_group) * size, whole)
    return start, min(size, whole - start)
