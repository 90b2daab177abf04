"""Getting a model ready for its device: what most backends do before they wrap it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.backend import RunSettings, Topology
from drivetrain.runtime import precision
from drivetrain.runtime.trees import attribute


def original_module(model: nn.Module) -> nn.Module:
    """The user's module behind ``torch.compile``, whose parameters have the original names."""
    inner = attribute(model, "_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


def place_model(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: RunSettings, topology: Topology
) -> nn.Module:
    """Apply the precision policy and move to the device, in place: parameters stay the objects that optimizers hold.

    Returns:
        The module with the original parameter names.
    """
    module = original_module(model)
    precision.cast_parameters(module, settings.precision)
    if settings.place_on_device:
        module.to(topology.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer)
    return module


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Bring state that an optimizer already has beside its parameters: same device, and same dtype for moments."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(parameter)
