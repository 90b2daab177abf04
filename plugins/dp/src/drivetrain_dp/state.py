"""How a DataParallel model maps to the portable checkpoint: one process holds all, under the original names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, TorchEngine, portable


def portable_state(module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine) -> PortableState:
    """The module's tensors themselves, no copy."""
    state = portable.portable_state(module, optimizers)
    state.extra |= engine.state()
    return state


def portable_template(
    module: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, TensorSpec]
) -> PortableState:
    """Whole tensors."""
    return portable.portable_template(module, optimizers, saved)


def load_portable_state(
    module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine, state: PortableState
) -> None:
    """Take over a filled template."""
    portable.load_portable_state(module, optimizers, state)
    engine.load_state(state.extra)
