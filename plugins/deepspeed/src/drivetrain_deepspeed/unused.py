"""Skips the update of parameters without gradient in a window, as optimizers do in one process.

ZeRO steps a flat partition as a whole: what was not used has a gradient of zero there, by which momentum and weight
decay would move it. Their ranges are put back after each step; a group of which nothing was used is passed over.

The used parameters are determined on this rank only. DeepSpeed reduces gradients in buckets of what each rank has, so
that it trains only if all ranks use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed.layout import FlatGroup, flat_groups

_WITHOUT_COUNT = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)
"""Optimizers of torch whose updates do not depend on the number of steps, although some count it."""


@final
class Unused:
    """Parameters that the steps of one engine must not update.

    Args:
        zero: ``engine.optimizer`` of stages 1 to 3.
        named: a parameter in words, by identity.
    """

    def __init__(self, zero: Any, named: Callable[[int], str]) -> None:
        self._zero, self._named = zero, named
        self._now: frozenset[int] = frozenset()
        self.behind: dict[int, int] = {}
        """Step counts of parameters that an earlier step of their optimizer skipped."""
        flats = flat_groups(zero)
        self._trained = frozenset(id(piece.parameter) for flat in flats for piece in flat.pieces)
        self._members = [frozenset(id(piece.parameter) for piece in flat.pieces) for flat in flats]
        self._groups = {number: index for index, members in enumerate(self._members) for number in members}
        self._idle: frozenset[int] = frozenset()
        """Flat groups that the current step skips."""
        self._back: frozenset[int] = frozenset()
        """Parameters of :attr:`behind` that the current step updates."""
        self._counts_now: dict[int, int] = {}
        """Step counts of parameters that the current step is the first to skip."""
        theirs: Callable[[int], None] = zero._optimizer_step  # noqa: SLF001

        def step(index: int) -> None:
            if index in self._idle:
                return
            if self._now:
                self._keeping(theirs, index)
            else:
                theirs(index)

        zero._optimizer_step = step  # noqa: SLF001

    def begin(self, optimizer: Optimizer, held: frozenset[int], used: set[int]) -> None:
        """A step of this optimizer is about to begin.

        Args:
            optimizer: the script's.
            held: identities of its parameters.
            used: identities of those that backwards have reached since its last step.

        Raises:
            UnsupportedError: a parameter comes back, and the optimizer counts steps: one process counts those of each
                parameter, ZeRO one number for all.
        """
        mine = held & self._trained
        back = frozenset(used & mine & self.behind.keys())
        if back and not isinstance(optimizer, _WITHOUT_COUNT) and self._counts(optimizer):
            raise UnsupportedError(
                f"{self._named(next(iter(back)))} has a gradient, and had none in an earlier step of its group: "
                f"{type(optimizer).__name__} counts the steps of each parameter, and ZeRO keeps one count for a group",
                cure="Before prepare, give parameters that are not used in each step to a group or an optimizer of "
                "their own; or use zero_stage: 0.",
            )
        self._now = mine - used if not mine <= used else frozenset()
        self._back = back
        if self._now:
            # Torch's own optimizers count steps only in the state of each parameter; others may count in their groups.
            if type(optimizer).__module__.startswith("torch.optim."):
                self._idle = frozenset(index for index, each in enumerate(self._members) if each <= self._now)
            counts = [_count(flat) for flat in flat_groups(self._zero)]
            left = {number for number in self._now - self.behind.keys() if self._groups[number] not in self._idle}
            self._counts_now = {number: counts[self._groups[number]] for number in left}

    def end(self, *, applied: bool) -> None:
        """End the step and update the counts."""
        if applied:
            for number in self._back:
                self.behind[number] += 1
            if self._now:
                self.behind |= self._counts_now
        self._now = self._back = self._idle = frozenset()
        self._counts_now = {}

    def resume(self, behind: Mapping[int, int]) -> None:
        """Restore the step counts of a checkpoint."""
        self.behind = dict(behind)

    def _counts(self, optimizer: Optimizer) -> bool:
        slots = [slot for state in optimizer.state.values() for slot in state.values()]
        return any(not isinstance(slot, Tensor) or not slot.dim() for slot in slots)

    @torch.no_grad()
    def _keeping(self, theirs: Callable[[int], None], index: int) -> None:
        flat = flat_groups(self._zero)[index]
        ranges = [
            slice(piece.at, piece.at + piece.numel)
            for piece in flat.pieces
            if piece.numel and id(piece.parameter) in self._now
        ]
        before = {slot: [tensor[each].clone() for each in ranges] for slot, tensor in _tensors(flat).items()}
        with torch.enable_grad():
            theirs(index)
        for slot, tensor in _tensors(flat).items():
            for each, values in zip(ranges, before.get(slot, [None] * len(ranges)), strict=True):
                if values is None:
                    tensor[each].zero_()  # The step made this slot; one process has none yet.
                else:
                    tensor[each].copy_(values)


def _count(flat: FlatGroup) -> int:
    """Steps that this group has had; 1 for any number where its optimizer keeps none."""
    return int(flat.state.get("step", 1)) if flat.state else 0


def _tensors(flat: FlatGroup) -> dict[str, Tensor]:
    """Master values and those slots of state that have an entry for each element."""
    state = {
        slot: value
        for slot, value in flat.state.items()
        if isinstance(value, Tensor) and value.shape == flat.flat.shape
    }
    return {"": flat.flat.detach(), **state}
