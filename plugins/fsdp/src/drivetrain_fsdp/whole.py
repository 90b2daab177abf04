"""Parameters that ``fully_shard`` cannot shard (0-d, or of another dtype than their unit), replicated on every rank.

One small collective averages their gradients after a backward that synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from drivetrain.api import Topology, collectives


class WholeParameters:
    """Replicated parameters of a model.

    Args:
        parameters: the trained ones among them.
        topology: the job.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], topology: Topology) -> None:
        self.parameters, self._topology = list(parameters), topology
        self._reached: set[int] = set()
        """Parameters, by identity, whose ``.grad`` a backward has added to since it was reduced. A gradient that the
        script has assigned is its own, as on one process."""
        self._aside: dict[int, Tensor] = {}
        """Reduced gradients of an earlier backward, by their parameter's identity, while new ones gather in ``.grad``.
        """
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        """Nodes that accumulate their gradients; torch keeps none of them, and their hooks, otherwise."""
        for parameter, node in zip(self.parameters, self._nodes, strict=True):
            # Not a hook of the parameter, which would count as one of the script's. It holds nothing of this object.
            node.register_hook(partial(_note, self._reached, id(parameter)))

    def before_backward(self) -> None:
        """Set reduced gradients aside before a backward adds this rank's own."""
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is not None and id(parameter) not in self._reached:
                self._aside[id(parameter)] = grad
                parameter.grad = None

    def reduce(self) -> None:
        """Average the gradients accumulated since the last call over the data-parallel ranks. Collective over them."""
        like = [_as_real(parameter.detach()) for parameter in self.parameters]
        sizes = [each.numel() for each in like]
        exact = any(each.dtype == torch.float64 for each in like)
        dtype = torch.float64 if exact else torch.float32
        parts = []
        for parameter, each in zip(self.parameters, like, strict=True):
            grad = parameter.grad
            parts.append((torch.zeros_like(each) if grad is None else _as_real(grad.detach())).to(dtype).flatten())
        device = self.parameters[0].device
        # The last numbers tell whether a parameter was used: an unused one keeps no gradient.
        used = torch.tensor([float(parameter.grad is not None) for parameter in self.parameters], dtype=dtype)
        mean = collectives.all_reduce(torch.cat([*parts, used.to(device)]), "mean", self._topology)
        *means, used = torch.split(mean, [*sizes, len(sizes)])
        for parameter, each, grad, was_used in zip(self.parameters, like, means, used.tolist(), strict=True):
            total = self._aside.pop(id(parameter), None)
            if was_used:
                fresh = grad.view(each.shape).to(each.dtype)
                fresh = torch.view_as_complex(fresh) if parameter.is_complex() else fresh
                total = fresh if total is None else total.add_(fresh)
            parameter.grad = total
        self._reached.clear()

    def unreduced(self) -> bool:
        """Whether some gradient is not reduced."""
        return any(parameter.grad is not None and id(parameter) in self._reached for parameter in self.parameters)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the gradients of this optimizer's parameters that were set aside."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._aside.pop(id(parameter), None)
                if parameter.grad is None:
                    self._reached.discard(id(parameter))


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a last dim of two, any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _note(reached: set[int], number: int, *_: Any) -> None:
    reached.add(number)
