"""Gradients of ZeRO stage 3: this rank's shards of all parameters, in one buffer."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from drivetrain.api import multiply_gradients
from drivetrain_deepspeed.gradients import Gradients


@final
class PartitionedGradients(Gradients):
    """This rank's parts; with offload also in DeepSpeed's float32 buffers in CPU memory.

    Args:
        optimizer: ``engine.optimizer``.
        device: where backward runs.
    """

    partitioned = True

    def __init__(self, optimizer: Any, device: str) -> None:
        self._zero, self._device = optimizer, device
        self._written: set[int] = set()
        """Parameters whose range of the buffer may be non-zero."""
        self._known: set[int] = set()
        """Parameters that ever had a gradient."""
        self._first = True
        self._closed = False
        """A backward has closed the window, and no step of all has ended it."""

    def before_backward(self) -> None:
        zero = self._zero
        if zero._epilogue_ran_this_backward:  # noqa: SLF001
            # No forward ran after the last backward: without this the next backward would overwrite its gradients.
            zero.clear_backward_seen_flag()
        if self._closed and zero.offload_optimizer:
            # The script may have clipped these, or an optimizer has stepped with its own while others wait.
            self.settle()
            for group in zero.fp16_groups:
                for each in group:
                    if each.ds_id in self._written:
                        self._part(each.ds_id).copy_(self._offloaded(each))
        elif isinstance(self.factor, Tensor) or self.factor != 1.0:
            multiply_gradients([zero.grad_partitions_flat_buffer], self.factor)
            self.factor = 1.0
        self._closed = False

    def after_backward(self, closing: bool) -> None:
        used: set[int] = self._zero._offload_boundary_param_ids  # noqa: SLF001
        if self._first:
            # DeepSpeed overwrites the ranges that this backward used and keeps an earlier window's in others.
            for number in self._written - used:
                self._part(number).zero_()
            self._written, self._first = set(used), False
        else:
            self._written |= used
        self._known |= used
        self._closed = closing
        if closing and self._zero.offload_optimizer:
            self._complete()

    def pieces(self, wanted: frozenset[int] | None = None) -> list[Tensor]:
        zero = self._zero
        if zero.offload_optimizer:
            flats = zero.fp32_partitioned_groups_flat
            if wanted is None:
                return [flat.grad for flat in flats]
            return [self._offloaded(each) for group in zero.fp16_groups for each in group if id(each) in wanted]
        if wanted is None:
            return [zero.grad_partitions_flat_buffer]
        return [self._part(each.ds_id) for group in zero.fp16_groups for each in group if id(each) in wanted]

    def end_window(self) -> None:
        self.factor, self._first, self._closed = 1.0, True, False
        self._zero.micro_step_id = 0

    def drop(self) -> None:
        self.end_window()
        self._zero.zero_grad(set_to_none=True)
        self._zero._offload_boundary_param_ids = set()  # noqa: SLF001
        if self._zero.offload_optimizer:
            self._zero.norm_for_param_grads = {}

    def multiply(self, factor: float | Tensor) -> None:
        self.factor = self.factor * factor

    def keep(self) -> dict[int, Any]:
        zero = self._zero
        return dict(zero.norm_for_param_grads if zero.offload_optimizer else zero.averaged_gradients)

    def give_back(self, kept: dict[int, Any]) -> None:
        if self._zero.offload_optimizer:
            self._zero.norm_for_param_grads = kept
        else:
            self._zero.averaged_gradients = kept
        # DeepSpeed begins a window after a step: its next backward would overwrite pending gradients instead of adding.
        self._zero.micro_step_id = 1

    def _part(self, number: int) -> Tensor:
        parts: dict[int, Tensor] = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition  # noqa: SLF001
        return parts[number]

    def _offloaded(self, parameter: Any) -> Tensor:
        zero = self._zero
        index, start, numel = zero.grad_position[zero.get_param_id(parameter)]
        part: Tensor = zero.fp32_partitioned_groups_flat[index].grad.narrow(0, start, numel)
        return part

    def _complete(self) -> None:
        """Offloaded: bring what the closing backward did not use into the float32 buffer too, be it zero."""
        zero = self._zero
        gradients: dict[int, list[Tensor]] = {}
        places: dict[int, list[int]] = {}
        for group in zero.fp16_groups:
            for parameter in group:
                if zero.get_param_id(parameter) not in zero.norm_for_param_grads and parameter.ds_id in self._known:
                    part = self._part(parameter.ds_id).to(self._device)
                    zero._offload_grad_partition_at_boundary(parameter, part, gradients, places)  # noqa: SLF001
        zero._swap_out_offload_fp32_gradients(gradients, places)  # noqa: SLF001
