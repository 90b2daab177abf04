"""Gradients of ZeRO stages 1 and 2: each rank keeps an equal slice of a group's flat buffer."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain_deepspeed.gradients import Gradients
from drivetrain_deepspeed.layout import flat_groups


@final
class SlicedGradients(Gradients):
    """This rank's slices, in DeepSpeed's list of reduced pieces or, with offload, in a buffer in CPU memory.

    Args:
        optimizer: ``engine.optimizer``.
    """

    partitioned = True

    def __init__(self, optimizer: Any) -> None:
        self._zero = optimizer
        self._places = {id(piece.parameter): piece for group in flat_groups(optimizer) for piece in group.pieces}
        """Place of each parameter's shard in the buffer of its group."""
        self._aside: list[list[Tensor]] | None = None
        """Reduced gradients of earlier backwards: DeepSpeed would put those of the next in their place."""
        self._written: set[int] = set()
        """Offloaded: parameters whose range of the buffer may be non-zero."""
        self._closed = False
        """A backward has closed the window."""
        if optimizer.overlap_comm and not optimizer.partition_gradients:
            self._theirs = optimizer.reduce_gradients
            optimizer.reduce_gradients = self._reduce_all

    def before_backward(self) -> None:
        zero = self._zero
        if zero.cpu_offload and zero.micro_step_id >= 0:
            # DeepSpeed would add to what an earlier window left of parameters that this one has not used yet.
            for number in zero.accumulated_grads_in_cpu.keys() - zero._offload_accumulated_param_ids:  # noqa: SLF001
                zero.accumulated_grads_in_cpu[number].zero_()
        if zero._epilogue_ran_this_backward:  # noqa: SLF001
            # No forward ran after the last backward.
            zero.clear_backward_seen_flag()
        if not self._closed:
            return
        self._closed = False
        self.settle()
        fresh = self._groups()
        if zero.cpu_offload:
            fresh = [[piece.clone() for piece in group] for group in fresh]
            self._begin_window()
        else:
            zero.averaged_gradients = {}
        self._aside = fresh if self._aside is None else _sum(self._aside, fresh)

    def after_backward(self, closing: bool) -> None:
        if not closing:
            return
        self._closed = True
        if self._zero.cpu_offload:
            self._complete()
        if self._aside is not None:
            _sum(self._groups(), self._aside)
            self._aside = None

    def pieces(self, wanted: frozenset[int] | None = None) -> list[Tensor]:
        if wanted is None:
            return [piece for group in self._groups() for piece in group]
        found: list[Tensor] = []
        for index, mine in enumerate(self._zero.params_in_partition):
            flat = self._flat(index)
            if flat is not None:
                found += [self._cut(flat, parameter) for parameter in mine if id(parameter) in wanted]
                continue
            pieces = self._zero.averaged_gradients.get(index) or ()
            real = [piece for piece in pieces if not getattr(piece, "_zero_padding", False)]
            # A rank without parameters holds one piece, of zeros.
            found += [piece for piece, parameter in zip(real, mine, strict=False) if id(parameter) in wanted]
        return found

    def end_window(self) -> None:
        self._aside, self.factor, self._closed = None, 1.0, False

    def drop(self) -> None:
        zero = self._zero
        self.end_window()
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        zero.all_grad_tensors = {}
        if zero.cpu_offload:
            self._begin_window()
        else:
            zero.micro_step_id = -1

    def multiply(self, factor: float | Tensor) -> None:
        self.factor = self.factor * factor

    def keep(self) -> dict[int, Any]:
        zero = self._zero
        return dict(zero.norm_for_param_grads if zero.cpu_offload else zero.averaged_gradients)

    def give_back(self, kept: dict[int, Any]) -> None:
        if self._zero.cpu_offload:
            self._zero.norm_for_param_grads = kept
        else:
            self._zero.averaged_gradients = kept

    def _reduce_all(self, pipeline_parallel: bool = False) -> None:
        """Stage 1 with ``overlap_comm``: reduce what earlier backwards of the window gathered, too.

        DeepSpeed reduces while the closing backward runs, and only what that backward uses.
        """
        zero = self._zero
        waiting = {number for bucket in zero.ipg_buckets.values() for _, _, number in bucket.params}
        for index, group in enumerate(zero.bit16_groups):
            for parameter in group:
                number = zero.get_param_id(parameter)
                there = zero.get_gradient_for_reduction(parameter) is not None
                if there and number not in waiting and not zero.params_already_reduced[number]:
                    zero.setup_buckets()
                    zero.reduce_ready_partitions_and_remove_grads(parameter, index)
        self._theirs(pipeline_parallel)

    def _groups(self) -> list[list[Tensor]]:
        """Return this rank's pieces of each parameter group, in order."""
        found = []
        for index in range(len(self._zero.bit16_groups)):
            flat = self._flat(index)
            found.append(list(self._zero.averaged_gradients.get(index) or ()) if flat is None else [flat])
        return found

    def _flat(self, index: int) -> Tensor | None:
        """The buffer of one group's gradients, where they are in one."""
        zero = self._zero
        if zero.cpu_offload:
            offloaded: Tensor = zero.single_partition_of_fp32_groups[index].grad
            return offloaded
        flat: Tensor | None = getattr(zero.averaged_gradients.get(index), "flat_partition", None)
        return flat

    def _cut(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        place = self._places[id(parameter)]
        return flat.narrow(0, place.at, place.numel)

    def _begin_window(self) -> None:
        """Offloaded: let the next backward write instead of adding."""
        zero = self._zero
        zero.micro_step_id = -1
        zero.norm_for_param_grads = {}
        zero._offload_accumulated_param_ids = set()  # noqa: SLF001

    def _complete(self) -> None:
        """Offloaded: parameters that the last backward did not use.

        DeepSpeed copies into its float32 buffer only what the closing backward used. What others have gathered before
        is fetched; what no rank used is zero, not what the last window left.
        """
        zero = self._zero
        waiting = zero._offload_accumulated_param_ids - zero.norm_for_param_grads.keys()  # noqa: SLF001
        touched: set[int] = set()
        for index, group in enumerate(zero.params_in_partition):
            flat = zero.single_partition_of_fp32_groups[index].grad
            for parameter in group:
                number = zero.get_param_id(parameter)
                if number in waiting:
                    zero._restore_cpu_offload_grad_to_gpu(parameter)  # noqa: SLF001
                    zero.set_norm_for_param_grad_in_gpu(parameter)
                    zero.update_offload_overflow_tracker_for_param_grad(parameter)
                    zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)
                if number in zero.norm_for_param_grads:
                    touched.add(number)
                elif number in self._written:
                    self._cut(flat, parameter).zero_()
        # The gradients kept aside are added to this later.
        self._written = touched if self._aside is None else touched | self._written


def _sum(into: list[list[Tensor]], others: list[list[Tensor]]) -> list[list[Tensor]]:
    for group, more in zip(into, others, strict=True):
        torch._foreach_add_(group, more)
    return into
