"""Parameters that a window did not use stay as they are, as in one process, where they have no gradient.

ZeRO steps a flat partition as a whole: what was not used has a gradient of zero there, by which momentum and weight
decay would move it. Their ranges are put back after each step.

Which parameters a window used is asked on this rank alone. DeepSpeed reduces gradients in buckets of what each rank
has, so that it trains only where all ranks use the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed.layout import FlatGroup, flat_groups

_WITHOUT_COUNT = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)
"""Of torch: their updates do not depend on the number of steps, although some keep it."""


@final
class Unused:
    """What the steps of one engine must leave alone.

    Args:
        zero: ``engine.optimizer`` of stages 1 to 3.
        named: a parameter in words, by identity.
    """

    def __init__(self, zero: Any, named: Callable[[int], str]) -> None:
        self._zero, self._named = zero, named
        self._now: frozenset[int] = frozenset()
        self._missed: set[int] = set()
        """Parameters that an earlier step of their optimizer left alone."""
        self._trained = frozenset(id(piece.parameter) for flat in flat_groups(zero) for piece in flat.pieces)
        theirs: Callable[[int], None] = zero._optimizer_step  # noqa: SLF001

        def step(index: int) -> None:
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
        back = used & mine & self._missed
        if back and not isinstance(optimizer, _WITHOUT_COUNT) and self._counts(optimizer):
            raise UnsupportedError(
                f"{self._named(next(iter(back)))} has a gradient again, and earlier windows used others without it: "
                f"ZeRO keeps one count of steps for all parameters of a group, which {type(optimizer).__name__} reads",
                cure="Use every parameter in every window (add `0.0 * p.sum()` to the loss), give those that are used "
                "now and then to an optimizer of their own, or use zero_stage: 0.",
            )
        self._now = mine - used if not mine <= used else frozenset()

    def end(self, *, applied: bool) -> None:
        """That step is over."""
        if applied and self._now:
            self._missed |= self._now
        self._now = frozenset()

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


def _tensors(flat: FlatGroup) -> dict[str, Tensor]:
    """Master values and those slots of state that have an entry for each element."""
    state = {
        slot: value
        for slot, value in flat.state.items()
        if isinstance(value, Tensor) and value.shape == flat.flat.shape
    }
    return {"": flat.flat.detach(), **state}
