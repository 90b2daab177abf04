"""Copies a script's writes to parameters after ``prepare`` into DeepSpeed's master values.

DeepSpeed updates its own master values and copies them to the parameters at each step, so that a write to a parameter
would last until then. If masters have the parameters' dtype and device, they share memory, so that a write changes
both. If not (offloaded, or parameters of low precision), values that differ before a step were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from deepspeed import comm
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed.guard import Guard
from drivetrain_deepspeed.layout import flat_groups, num_elements

_ROW = 1024
"""Elements of a row of :func:`_fingerprint`."""


@final
class Writes:
    """The script's writes to the parameters of one engine.

    Args:
        module: the user's.
        zero: ``engine.optimizer`` of stages 1 to 3.
        stage: of ZeRO.
        held: parameters of the script's optimizers.
        guard: of the module's parameters.
    """

    def __init__(self, module: nn.Module, zero: Any, stage: int, held: Iterable[nn.Parameter], guard: Guard) -> None:
        self._model = type(module).__name__
        self._names = {id(each): name for name, each in module.named_parameters()}
        self._guard = guard
        trained: list[Any] = [piece.parameter for flat in flat_groups(zero) for piece in flat.pieces]
        ours = set(map(id, trained))
        self._trained = trained
        # In a parameter without an element there is nothing to update.
        self._left_out = [each for each in held if id(each) not in ours and num_elements(each)]
        self._places = [
            (owner._parameters, key, each)  # noqa: SLF001
            for owner in module.modules()
            for key, each in owner._parameters.items()  # noqa: SLF001
            if id(each) in ours
        ]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for part, master in _parts(zero, stage):
            if part.dtype == master.dtype and part.device == master.device and not _offloads(zero):
                master.data = part
            else:
                self._pairs.append((part, master))
        self._in_parts = stage == 3
        if not self._in_parts:
            zero._link_all_hp_params()  # noqa: SLF001  Its links are views of the masters that were.
        self._views = [] if self._in_parts else [each.detach() for each in trained]
        self._places_in_memory = [(view.data_ptr(), view.stride()) for view in self._views]
        self._prints: list[Tensor | None] = []
        self.settle()

    def check_places(self) -> None:
        """Look whether the module still has the parameters that DeepSpeed steps. Not collective.

        Raises:
            UnsupportedError: one was replaced.
        """
        for places, key, parameter in self._places:
            if places.get(key) is not parameter:
                raise UnsupportedError(
                    f"{self._named(parameter)} was replaced after prepare, and DeepSpeed would train the former one, "
                    "which the model no longer has",
                    cure="Write values into the parameter (`with torch.no_grad(): p.copy_(values)`, load_state_dict "
                    "without assign=True), or replace it before prepare.",
                )

    def check(self) -> None:
        """Look whether DeepSpeed steps what a script means to be stepped. Not collective.

        Raises:
            UnsupportedError: a parameter was replaced or unfrozen.
        """
        self.check_places()
        for parameter in self._left_out:
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"{self._named(parameter)} was frozen when it was prepared and requires a gradient now, and ZeRO "
                    "updates only parameters that were trained when they were prepared",
                    cure="Prepare a new optimizer once it is unfrozen, whose state begins anew: optimizer = "
                    "accelerator.prepare(torch.optim.AdamW(model.parameters())). Or prepare it with "
                    "requires_grad=True in an optimizer of its own that does not step yet.",
                )

    @property
    def rounds(self) -> bool:
        """Whether parameters are masters in a lower precision."""
        return any(part.dtype != master.dtype for part, master in self._pairs)

    @torch.no_grad()
    def take_in(self) -> None:
        """Copy writes since the last step to the master values. Not collective.

        Raises:
            UnsupportedError: a parameter was given another shape, dtype or device.
        """
        if self._in_parts:
            self._guard.take_in()
        else:
            self._take_in_replaced()
        for (part, master), before in zip(self._pairs, self._prints, strict=True):
            if before is None or not torch.equal(before, _fingerprint(part)):
                ours = part.to(master.device)
                master.copy_(torch.where(ours == master.to(ours.dtype), master, ours.to(master.dtype)))

    def settle(self) -> None:
        """Record that parameters and masters agree, after a step or a load."""
        self._prints = [_fingerprint(part) if part.device != master.device else None for part, master in self._pairs]

    def _take_in_replaced(self) -> None:
        """``parameter.data = values``: DeepSpeed's flat buffer must have them."""
        replaced = []
        for parameter, view, (address, stride) in zip(self._trained, self._views, self._places_in_memory, strict=True):
            # Other strides of the same memory result from `p.t_()`, which changes no value.
            if parameter.data_ptr() != address or parameter.stride() != stride:
                self._check_kind(parameter, view)
                # A copy: two parameters may have been given each other's memory.
                replaced.append((parameter, view, parameter.data.clone()))
                self._guard.keep_strides(parameter)
        for parameter, view, values in replaced:
            view.copy_(values)
            parameter.data = view

    def _check_kind(self, parameter: nn.Parameter, view: Tensor) -> None:
        now = parameter.data
        if now.shape != view.shape or now.dtype != view.dtype or now.device != view.device:
            raise UnsupportedError(
                f"{self._named(parameter)} was {_kind(view)} when it was prepared and is {_kind(now)} now, and "
                "DeepSpeed still steps it as it was",
                cure="Change shape, dtype and device before prepare; mixed_precision computes in a lower dtype.",
            )

    def _named(self, parameter: Any) -> str:
        return f"the parameter {self._names[id(parameter)]} of {self._model}"


def _parts(zero: Any, stage: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each group this rank's part of the parameters, and its master values in the same layout."""
    if stage == 3:
        yield from zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
        return
    every = zip(
        zero.parallel_partitioned_bit16_groups,
        zero.single_partition_of_fp32_groups,
        zero.real_dp_process_group,
        strict=True,
    )
    for parts, master, group in every:
        yield parts[comm.get_rank(group=group)], master


def _offloads(zero: Any) -> bool:
    """Whether masters are kept in CPU memory, which is another one where there is an accelerator."""
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


def _fingerprint(part: Tensor) -> Tensor:
    """Sums of the bits along rows and along columns: other values have other sums, values that changed places too."""
    bits = part.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
    whole = bits.numel() // _ROW * _ROW
    square = bits[:whole].view(-1, _ROW)
    return torch.cat([square.sum(0), square.sum(1), bits[whole:].long()])


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
