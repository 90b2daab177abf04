"""Averages one model's gradients over processes at the end of a window, and broadcasts its buffers."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import LocalGradients
from drivetrain_xla.reduction import Reduction


@final
class OverProcesses:
    """Averages the gradients of one model over processes, each contribution once.

    ``.grad`` holds what is not averaged yet, or what is; before a backward adds to means they are put aside.

    Args:
        module: the model.
        reduction: how means are made.
    """

    def __init__(self, module: nn.Module, reduction: Reduction) -> None:
        self._module, self._reduction = module, reduction
        self.enabled = True
        """The next backward ends a window."""
        self._averaged = False
        """``.grad`` holds means."""
        self._aside: dict[Tensor, Tensor] = {}
        self._local = LocalGradients(module, lambda: self.enabled)
        self._trained = False

    def ran(self) -> None:
        """A forward with gradients: buffers may have changed."""
        self._trained = self._trained or self._module.training

    def before_backward(self) -> None:
        """Put means aside. Local."""
        if self._averaged:
            self._averaged = False
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    self._aside[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def after_backward(self) -> None:
        """Average what this window has gathered and add what was put aside. Collective where a window ends.

        Buffers that a training forward may have changed become rank 0's, as under DistributedDataParallel.
        """
        if not self.enabled:
            return
        self._reduction.gradients([parameter for parameter in self._module.parameters() if parameter.requires_grad])
        for parameter, before in self._aside.items():
            parameter.grad = before if parameter.grad is None else parameter.grad + before
        self._aside.clear()
        self._averaged = True
        self._local.reduced()
        if self._trained:
            self._trained = False
            self._reduction.give(list(self._module.buffers()))

    def unreduced(self) -> bool:
        """Whether a gradient holds contributions of this process only. Local."""
        return self._local.exist()

    def forget(self, optimizer: Optimizer) -> None:
        """Discard the records of an optimizer's gradients, which were dropped."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._aside.pop(parameter, None)
