"""Rounds of local steps: where a round began, how it ends, and the outer optimizer. One for each inner optimizer.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1.
With theta the parameters at a round's beginning and theta_i those of worker i at its end,

    outer gradient = mean over the workers of (theta - theta_i)

and theta moves by SGD with Nesterov momentum on that gradient; every worker goes on from there. The inner optimizers'
own state stays with their workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from drivetrain_diloco.config import DiLoCoConfig

SLOT = "outer_momentum"
"""Under which name the outer momentum stands beside an inner optimizer's state in a checkpoint."""

Mean = Callable[[Tensor], Tensor]
"""Averages a tensor over the workers. Collective."""


@dataclass(frozen=True)
class RoundEnd:
    """Statistics of a round that has ended.

    Args:
        number: of the round, from 1.
        drift: norm of the outer gradient: how far the workers' mean went, on every worker the same.
        num_bytes: that each worker gave to be averaged.
    """

    number: int
    drift: float
    num_bytes: int


@final
class Rounds:
    """Counts an inner optimizer's steps, and joins the workers at the end of each round.

    Args:
        optimizer: the inner one; its trained parameters are what is joined.
        buffers: floating buffers of the model, averaged with them.
        section: the configuration.
        mean: averages over the workers.
    """

    def __init__(self, optimizer: Optimizer, buffers: Sequence[Tensor], section: DiLoCoConfig, mean: Mean) -> None:
        self.optimizer, self._buffers, self._section, self._mean = optimizer, buffers, section, mean
        self.steps = 0
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []
        self._outer: SGD | None = None
        self._momenta: dict[Tensor, Tensor] = {}

    @property
    def synchronous(self) -> bool:
        """Whether the next step is one whose gradients are averaged."""
        return self.steps < self._section.synchronous_steps

    @property
    def position(self) -> int:
        """Local steps made in the round that is under way; 0 = the workers agree."""
        return max(self.steps - self._section.synchronous_steps, 0) % self._section.local_steps

    def before_step(self) -> None:
        """Remember where a round begins. Local."""
        if self.synchronous or self.position:
            return
        if self._start:
            # Copied again: the script may have loaded other weights since the last round ended.
            for start, parameter in zip(self._start, self._parameters, strict=True):
                start.copy_(parameter.detach())
            return
        held = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._parameters = [one for one in held if one.requires_grad]
        self._start = [one.detach().clone() for one in self._parameters]
        outer = self._section
        self._outer = SGD(self._start, outer.outer_lr, outer.outer_momentum, nesterov=outer.outer_momentum > 0)
        for parameter, start in zip(self._parameters, self._start, strict=True):
            if parameter in self._momenta:
                self._outer.state[start]["momentum_buffer"] = self._momenta[parameter]

    def after_step(self) -> RoundEnd | None:
        """Count a step, and end the round if it was its last. Collective over the workers then.

        A step that was skipped counts, so that workers stay in the same round.
        """
        was_synchronous = self.synchronous
        self.steps += 1
        return None if was_synchronous or self.position else self._end()

    def finish(self) -> RoundEnd | None:
        """End the round now, however few steps it had; nothing when the workers agree already. Collective."""
        if not self.position:
            return None
        self.steps += self._section.local_steps - self.position
        return self._end()

    @torch.no_grad()
    def _end(self) -> RoundEnd:
        assert self._outer is not None
        drift = torch.zeros((), dtype=torch.float64)
        num_bytes = 0
        for same in _by_dtype([*zip(self._start, self._parameters, strict=True)]):
            # One message for all parameters of a dtype; it takes the memory of these parameters once more.
            joined = self._mean(torch.cat([(start - mine.detach()).reshape(-1) for start, mine in same]))
            drift += joined.double().norm().cpu() ** 2
            num_bytes += joined.nbytes
            gradients = torch.split(joined, [start.numel() for start, _ in same])
            for (start, _), gradient in zip(same, gradients, strict=True):
                start.grad = gradient.reshape(start.shape)
        self._outer.step()
        self._outer.zero_grad()
        for start, parameter in zip(self._start, self._parameters, strict=True):
            parameter.copy_(start)
        for buffer in self._buffers:
            buffer.copy_(self._mean(buffer))
            num_bytes += buffer.nbytes
        number = (self.steps - self._section.synchronous_steps) // self._section.local_steps
        return RoundEnd(number, float(drift.sqrt()), num_bytes)

    def momenta(self) -> dict[Tensor, Tensor]:
        """The outer momentum of each parameter that has one, shaped like it."""
        if self._outer is None:
            return dict(self._momenta)
        state = self._outer.state
        return {
            parameter: state[start]["momentum_buffer"]
            for parameter, start in zip(self._parameters, self._start, strict=True)
            if isinstance(state.get(start, {}).get("momentum_buffer"), Tensor)
        }

    def restart(self, steps: int, momenta: dict[Tensor, Tensor]) -> None:
        """Go on from the parameters as they are now, at the beginning of a round, with this outer momentum. Local."""
        self.steps, self._momenta = steps, momenta
        self._parameters, self._start, self._outer = [], [], None


def _by_dtype(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    found: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for start, parameter in pairs:
        found.setdefault(start.dtype, []).append((start, parameter))
    return list(found.values())
