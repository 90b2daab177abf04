"""Clips and skips optimizer steps on an asynchronous device without reading a value from it.

Whether a norm is finite is known on the device only, long after the host has recorded the step. So the step is recorded
with both outcomes, and the device selects one: each tensor that the optimizer wrote becomes
``where(finite, after, before)``, which XLA fuses with the update. What the optimizer counts on the host (its step, its
groups) is put back when the verdict is read: before the next step, when the device has long known it.
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.api import multiply_gradients, total_norm


def clip(grads: list[Tensor], max_norm: float, norm_type: float, device: str) -> Tensor:
    """Clip gradients to a global norm, on the device. Nothing is read: the norm is recorded, not computed yet.

    Returns:
        The norm before clipping, 0-d. A norm that is not finite clips nothing.
    """
    norm = total_norm(grads, norm_type).to(device)
    if grads:
        factor = max_norm / (norm + 1e-6)
        clips = torch.isfinite(norm) & (norm > max_norm)
        multiply_gradients(grads, torch.where(clips, factor, torch.ones_like(norm)))
    return norm


@final
class GuardedStep:
    """One step of an optimizer that is undone where ``finite`` turns out false.

    Args:
        optimizer: what steps.
        finite: 0-d boolean on the device.
    """

    def __init__(self, optimizer: Optimizer, finite: Tensor) -> None:
        self._optimizer, self._finite = optimizer, finite
        self._groups: list[dict[str, Any]] = []
        self._host: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def run(self, closure: Any = None) -> None:
        """Record the step with both outcomes."""
        optimizer, finite = self._optimizer, self._finite
        trained = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._groups = [_own(group) for group in optimizer.param_groups]
        before = [parameter.detach().clone() for parameter in trained]
        state: dict[Tensor, dict[str, Any]] = {}
        for parameter in trained:
            if parameter in optimizer.state:
                state[parameter] = {name: _kept(value) for name, value in optimizer.state[parameter].items()}
        with torch.enable_grad():
            optimizer.step(closure)
        # Only values that the step itself has changed: a learning rate set in the meantime is the script's.
        self._groups = [
            {name: value for name, value in old.items() if group.get(name) != value}
            for group, old in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        for parameter, old in zip(trained, before, strict=True):
            parameter.copy_(torch.where(finite, parameter, old))
        for parameter, slots in state.items():
            for name, old in slots.items():
                new = optimizer.state[parameter][name]
                if isinstance(old, Tensor) and isinstance(new, Tensor) and new.device.type != "cpu":
                    new.copy_(torch.where(finite, new, old))
        self._host = {
            parameter: {name: value for name, value in slots.items() if not _on_device(value)}
            for parameter, slots in state.items()
        }
        self._without_state = [parameter for parameter in trained if parameter not in state]

    def was_skipped(self) -> bool:
        """Wait for the device; when the step was not applied, put back what the host counted."""
        if bool(self._finite.item()):
            return False
        for parameter in self._without_state:
            self._optimizer.state.pop(parameter, None)
        for parameter, slots in self._host.items():
            self._optimizer.state[parameter].update(slots)
        for group, old in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(old)
        return True


def _own(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, without its parameters and without tensors on the device."""
    return {name: copy.copy(value) for name, value in group.items() if name != "params" and not _on_device(value)}


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
